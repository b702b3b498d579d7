"""Checkpoint folders: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import IntegrityError, NotFoundError
from workers.trainer.checkpoint import CheckpointFolder, Sealed, TrainerState, open_checkpoint, verify
from workers.trainer.messages import UpdateMetrics

METRICS = UpdateMetrics.model_validate({name: 0 for name in UpdateMetrics.model_fields})


def _state(step: int, lineage: int = 0) -> TrainerState:
    return TrainerState(
        run="demo",
        lineage=lineage,
        step=step,
        version=step + 1,
        seed=0,
        world_size=1,
        compute_dtype="float32",
        manifest_digest="0" * 64,
        parent="",
        metrics=METRICS,
    )


def _write(folder: CheckpointFolder, step: int, lineage: int = 0) -> Sealed:
    temporary = folder.begin(lineage, step)
    (temporary / "state").mkdir()
    (temporary / "state" / "weights.pt").write_bytes(b"weights of %d" % step)
    return folder.seal(temporary, _state(step, lineage))


def test_a_sealed_checkpoint_is_found_with_its_state_and_digest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    sealed = _write(folder, 4)
    assert folder.find(0, 4) == sealed == open_checkpoint(sealed.path)
    assert sealed.state == _state(4)
    verify(sealed)


def test_equal_content_has_an_equal_digest(tmp_path: Path) -> None:
    one, other = _write(CheckpointFolder(tmp_path / "a"), 1), _write(CheckpointFolder(tmp_path / "b"), 1)
    assert one.digest == other.digest
    assert one.digest != _write(CheckpointFolder(tmp_path / "a"), 2).digest


def test_a_checkpoint_that_was_not_sealed_does_not_exist(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    temporary = folder.begin(0, 1)
    assert folder.find(0, 1) is None
    with pytest.raises(NotFoundError, match=r"not a complete checkpoint"):
        open_checkpoint(temporary)


def test_what_a_killed_attempt_left_is_not_taken_over(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (folder.begin(0, 1) / "half.pt").write_bytes(b"half")
    assert list(folder.begin(0, 1).iterdir()) == []


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    sealed = _write(CheckpointFolder(tmp_path), 1)
    file = sealed.path / "state" / "weights.pt"
    if damage == "change":
        file.write_bytes(b"other weights")
    else:
        file.unlink()
    with pytest.raises(IntegrityError, match=r"weights\.pt"):
        verify(sealed)


def test_a_damaged_or_half_removed_checkpoint_is_not_found_and_can_be_written_again(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    (_write(folder, 1).path / "state" / "weights.pt").write_bytes(b"other weights")
    (_write(folder, 2).path / "manifest.json").unlink()
    for step in (1, 2):
        assert folder.find(0, step) is None
        assert _write(folder, step) == folder.find(0, step)


def test_a_state_that_cannot_be_read_is_an_integrity_error(tmp_path: Path) -> None:
    sealed = _write(CheckpointFolder(tmp_path), 1)
    (sealed.path / "state.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"state\.json"):
        open_checkpoint(sealed.path)


def test_the_newest_are_kept_and_the_held_one_is_among_them(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    sealed = [_write(folder, step) for step in range(4)]
    abandoned = folder.begin(0, 9)

    removed = folder.collect(sealed[3], keep=2)

    assert sorted(removed) == sorted([sealed[0].path, sealed[1].path, abandoned])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l0-s2", "l0-s3"]


def test_keeping_one_never_removes_the_held_checkpoint_nor_a_newer_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    sealed = [_write(folder, step) for step in range(3)]
    assert folder.collect(sealed[1], keep=1) == [sealed[0].path]
