"""What the locked environments hold: no compromised release, and no client of other people's in ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements"
ROLES = sorted(REQUIREMENTS.glob("*.lock"))
CLIENTS = sorted((REQUIREMENTS / "clients").glob("*.lock"))
COMPROMISED = {("litellm", "1.107.0")}


def locked(lock: Path) -> dict[str, str]:
    """Package -> its one version."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), flags=re.MULTILINE))


def test_there_is_a_lock_for_every_client_and_its_input_says_what_is_in_it() -> None:
    inputs = sorted((REQUIREMENTS / "clients").glob("*.in"))
    assert [path.stem for path in inputs] == [path.stem for path in CLIENTS]
    for path in inputs:
        names = re.findall(r"^([A-Za-z0-9._-]+)", path.read_text(), flags=re.MULTILINE)
        assert set(names) <= set(locked(path.with_suffix(".lock"))), path.name


@pytest.mark.parametrize("lock", CLIENTS, ids=[lock.stem for lock in CLIENTS])
def test_no_client_is_locked_to_a_compromised_release(lock: Path) -> None:
    assert locked(lock).items().isdisjoint(COMPROMISED)


def test_litellm_is_asked_for_by_one_exact_version_wherever_it_is_locked() -> None:
    with_litellm = [lock for lock in CLIENTS if "litellm" in locked(lock)]
    assert with_litellm
    for lock in with_litellm:
        pin = re.search(r"^litellm==(\S+)$", lock.with_suffix(".in").read_text(), flags=re.MULTILINE)
        assert pin is not None, lock.name
        assert pin[1] == locked(lock)["litellm"]


@pytest.mark.parametrize("lock", ROLES, ids=[lock.stem for lock in ROLES])
def test_litellm_is_in_none_of_our_own_environments(lock: Path) -> None:
    assert "litellm" not in locked(lock)


@pytest.mark.parametrize("role", ["proxy", "control", "trainer"])
def test_httpx_is_in_no_server_s_environment(role: str) -> None:
    # httpx2 is: tokenizers needs huggingface-hub, which needs it.
    assert "httpx" not in locked(REQUIREMENTS / f"{role}.lock")


def test_every_locked_package_of_a_client_has_hashes() -> None:
    for lock in CLIENTS:
        entries = re.split(r"^(?=[A-Za-z0-9._-]+==)", lock.read_text(), flags=re.MULTILINE)[1:]
        assert len(entries) == len(locked(lock))
        assert all("--hash=sha256:" in entry for entry in entries), lock.name
