"""Checkpoint folders: written beside their final name, sealed by a manifest, then renamed. No torch.

``<checkpoints>/l<lineage>-s<step>/`` holds what the back end wrote, ``state.json`` (:class:`TrainerState`) and, written
last, ``manifest.json`` with the sha256 of every other file. The digest of a checkpoint is the sha256 of its manifest.
A folder without a manifest, or under a temporary name, does not exist for anyone. Files are not forced to disk: a
power loss may damage a checkpoint, which its digests tell.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import IntegrityError, NotFoundError
from workers.trainer.messages import ColumnRef, UpdateMetrics

_log = logging.getLogger(__name__)
_NAME = re.compile(r"^l(\d+)-s(\d+)$")
_TEMPORARY = ".tmp-"


class TrainerState(BaseModel):
    """What our part of the trainer knows; the rest is the back end's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    lineage: int
    step: int
    version: int
    """Weight version held: ``step + 1``."""
    seed: int
    world_size: int
    """Ranks that made it; any number can go on."""
    compute_dtype: str
    manifest_digest: str
    """Batch that made this state."""
    parent: str
    """Digest of the checkpoint the update started from; empty for the initial model."""
    metrics: UpdateMetrics
    dropped: tuple[str, ...] = ()
    """Sessions of the manifest that were not trained."""
    returns: ColumnRef | None = None
    """What a critic apart is to learn from the step."""


@dataclass(frozen=True)
class Sealed:
    """A committed checkpoint."""

    path: Path
    digest: str
    state: TrainerState


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, lineage: int, step: int) -> Path:
        """An empty temporary folder; what a killed attempt left there is removed."""
        path = self.root / f"{_TEMPORARY}l{lineage}-s{step}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def seal(self, temporary: Path, state: TrainerState) -> Sealed:
        """Write state and manifest, then give the folder its name."""
        (temporary / "state.json").write_text(state.model_dump_json(indent=1))
        files = {name: _sha256(temporary / name) for name in _files(temporary)}
        (temporary / "manifest.json").write_text(json.dumps(files, indent=1, sort_keys=True))
        final = self.root / f"l{state.lineage}-s{state.step}"
        if final.exists():
            shutil.rmtree(final)  # incomplete or damaged, or find() would have returned it
        temporary.rename(final)
        return Sealed(final, _sha256(final / "manifest.json"), state)

    def find(self, lineage: int, step: int) -> Sealed | None:
        """The committed checkpoint of a step, verified; None if there is none, or one that is damaged."""
        path = self.root / f"l{lineage}-s{step}"
        try:
            found = open_checkpoint(path)
            verify(found)
        except NotFoundError:
            return None
        except IntegrityError as error:
            _log.warning("a finished step counts as not trained: %s", error)
            return None
        return found

    def collect(self, held: Sealed, keep: int) -> list[Path]:
        """Remove all but the newest ``keep`` checkpoints up to the held one, and temporary folders.

        Called when a step starts: its start proves that the held checkpoint is in the ledger. Checkpoints newer than
        the held one are left alone.
        """
        older = [
            (state.version, state.lineage, path)
            for path, state in self._sealed()
            if path != held.path and state.version <= held.state.version
        ]
        doomed = [path for _, _, path in sorted(older, reverse=True)[keep - 1 :]]
        doomed += self.root.glob(f"{_TEMPORARY}*")
        for path in doomed:
            # A folder that is removed only in part must not look like a checkpoint.
            (path / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(path)
        return doomed

    def _sealed(self) -> list[tuple[Path, TrainerState]]:
        paths = [p for p in self.root.iterdir() if _NAME.match(p.name) and (p / "manifest.json").is_file()]
        return [(path, _state(path)) for path in paths]


def open_checkpoint(path: Path) -> Sealed:
    """Read state and digest. Raises :class:`NotFoundError` for a folder without a manifest."""
    if not (path / "manifest.json").is_file():
        raise NotFoundError(f"{path} is not a complete checkpoint: it has no manifest.json")
    return Sealed(path, _sha256(path / "manifest.json"), _state(path))


def verify(checkpoint: Sealed) -> None:
    """Compare every file with the manifest. Raises :class:`IntegrityError`."""
    expected: dict[str, str] = json.loads((checkpoint.path / "manifest.json").read_text())
    found = set(_files(checkpoint.path)) - {"manifest.json"}
    if missing := sorted(expected.keys() - found):
        raise IntegrityError(f"checkpoint {checkpoint.path} lacks {missing[0]}: restore it or resume from an older one")
    for name, digest in expected.items():
        if _sha256(checkpoint.path / name) != digest:
            raise IntegrityError(f"checkpoint {checkpoint.path}: {name} is damaged (sha256 differs from the manifest)")


def _state(path: Path) -> TrainerState:
    try:
        return TrainerState.model_validate_json((path / "state.json").read_text())
    except (FileNotFoundError, ValidationError) as error:
        raise IntegrityError(f"checkpoint {path}: state.json cannot be read: {error}") from error


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
