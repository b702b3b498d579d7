"""Published weights: immutable, verified, collected."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from storage.errors import ConfigError, IntegrityError, NotFoundError
from storage.weights import WeightsRef, WeightsStore, folder_digest


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


def publish(store: WeightsStore, version: int, content: str, config: str = "{}") -> WeightsRef:
    folder = store.begin(version)
    (folder / "model.safetensors").write_text(content)
    (folder / "config.json").write_text(config)
    return store.commit(version, folder)


def test_the_digest_is_over_the_weight_files_only(store: WeightsStore) -> None:
    one, other = publish(store, 1, "weights"), publish(store, 2, "weights", config='{"a": 1}')
    line = f"model.safetensors:{hashlib.sha256(b'weights').hexdigest()}"
    assert one.digest == other.digest == hashlib.sha256(line.encode()).hexdigest()
    assert store.verify(Path(one.path)) == one.digest == folder_digest(Path(one.path))


def test_the_digest_is_the_same_however_the_files_are_listed(tmp_path: Path) -> None:
    for name in ("model-2.safetensors", "model-10.safetensors"):
        (tmp_path / name).write_text(name)
    lines = sorted(
        f"{name}:{hashlib.sha256(name.encode()).hexdigest()}"
        for name in ("model-2.safetensors", "model-10.safetensors")
    )
    assert folder_digest(tmp_path) == hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_nothing_is_published_before_the_commit(store: WeightsStore) -> None:
    folder = store.begin(1)
    (folder / "model.safetensors").write_text("half")
    assert store.latest() is None
    with pytest.raises(NotFoundError, match="version 1"):
        store.get(1)


def test_weights_published_twice_are_the_same_and_leave_no_rest(store: WeightsStore) -> None:
    first = publish(store, 1, "weights")
    assert publish(store, 1, "weights") == first
    assert [path.name for path in store.root.iterdir()] == [Path(first.path).name]


def test_a_version_made_again_with_other_weights_overwrites_nothing(store: WeightsStore) -> None:
    first, second = publish(store, 1, "weights"), publish(store, 1, "other")
    assert store.verify(Path(first.path)) == first.digest
    assert store.get(1, first.digest) == first
    assert store.get(1) == store.latest() == second


def test_the_latest_is_the_highest_version(store: WeightsStore) -> None:
    publish(store, 10, "b")
    publish(store, 2, "a")
    latest = store.latest()
    assert latest is not None
    assert latest.version == 10


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_that_changed_is_found(store: WeightsStore, file: str) -> None:
    ref = publish(store, 1, "weights")
    (Path(ref.path) / file).write_text("tampered")
    with pytest.raises(IntegrityError, match=file):
        store.verify(Path(ref.path))
    (Path(ref.path) / file).unlink()
    with pytest.raises((IntegrityError, ConfigError)):
        store.verify(Path(ref.path))


def test_a_damaged_publication_is_not_taken_for_the_same(store: WeightsStore) -> None:
    ref = publish(store, 1, "weights")
    (Path(ref.path) / "config.json").write_text("tampered")
    with pytest.raises(IntegrityError, match=r"config\.json"):
        publish(store, 1, "weights")


def test_a_folder_without_weights_is_refused(store: WeightsStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        store.commit(1, store.begin(1))
    with pytest.raises(NotFoundError, match="never published"):
        store.verify(tmp_path)


def test_old_versions_and_abandoned_folders_are_collected(store: WeightsStore) -> None:
    refs = [publish(store, version, str(version)) for version in range(4)]
    abandoned, being_written = store.begin(2), store.begin(4)
    assert store.collect(2) == refs[:2]
    assert [Path(ref.path).exists() for ref in refs] == [False, False, True, True]
    assert (abandoned.exists(), being_written.exists()) == (False, True)
    with pytest.raises(ConfigError, match="at least one"):
        store.collect(0)


def test_versions_that_a_node_holds_outlive_any_number_of_newer_ones(store: WeightsStore, tmp_path: Path) -> None:
    refs = [publish(store, version, str(version)) for version in range(5)]
    store.pin("slow", [refs[0].path, str(tmp_path / "initial-model")])
    store.pin("quick", [refs[1].path])
    store.pin("quick", [refs[4].path])
    assert store.collect(1) == refs[1:4]
    store.pin("slow", [])
    assert store.collect(1) == refs[:1]
