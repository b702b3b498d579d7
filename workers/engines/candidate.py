"""Whether a checkpoint may be loaded over another: known from its files, before an engine that would not survive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.errors import EngineRejected
from workers.engines.checkpoint import Stored, read_json, stored_tensors, verified_digest
from workers.engines.fingerprint import FLOATS, check_finite, expected_checksums


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that is fit to be loaded."""

    path: Path
    digest: str
    """By the rule of the weights store."""
    tensors: tuple[Stored, ...]

    def checksums(self, names: Sequence[str], dtype: str) -> dict[str, str]:
        return expected_checksums(names, self.tensors, dtype)


def examine(path: Path, base: Path) -> Checkpoint:
    """Refuse a checkpoint that a server could not load over what it serves: it would not survive it.

    Args:
        path: directory to be loaded.
        base: directory that the server was started from.

    Raises:
        EngineRejected: corrupt, incomplete, not finite, or of another model.
    """
    tensors = stored_tensors(path)
    _same_model(path, base)
    ours, theirs = _shapes(tensors), _shapes(stored_tensors(base))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            raise EngineRejected(f"{path}: tensor {name} is missing")
        if name not in theirs:
            raise EngineRejected(f"{path}: unexpected tensor {name}")
        if ours[name] != theirs[name]:
            raise EngineRejected(f"{path}: tensor {name} has shape {ours[name]}, not {theirs[name]}")
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise EngineRejected(
                f"{path}: tensor {tensor.name} is of type {tensor.dtype}, not one of {', '.join(FLOATS)}"
            )
    check_finite(tensors)
    _check_index(path, {tensor.name: tensor.file.name for tensor in tensors})
    return Checkpoint(path, verified_digest(path), tuple(tensors))


def _same_model(path: Path, base: Path) -> None:
    """Shapes do not tell a change of head count or of an epsilon."""
    new, old = read_json(path / "config.json"), read_json(base / "config.json")
    for key in ("architectures", "hidden_act", "tie_word_embeddings", "rms_norm_eps", "num_attention_heads"):
        if new.get(key) != old.get(key):
            raise EngineRejected(f"{path}: {key} is {new.get(key)!r} where {old.get(key)!r} is served")
    for key in ("num_key_value_heads", "num_hidden_layers", "head_dim", "hidden_size", "vocab_size"):
        if key in new and key in old and new[key] != old[key]:
            raise EngineRejected(f"{path}: {key} is {new[key]!r} where {old[key]!r} is served")


def _shapes(tensors: Sequence[Stored]) -> dict[str, tuple[int, ...]]:
    """Without what a server reads past: a tied head that was stored, and rotary tables."""
    names = {tensor.name for tensor in tensors}
    tied = {"lm_head.weight"} if _tied(tensors) else set()
    return {
        tensor.name: tensor.shape
        for tensor in tensors
        if tensor.name in names - tied and not tensor.name.endswith("rotary_emb.inv_freq")
    }


def _tied(tensors: Sequence[Stored]) -> bool:
    return bool(tensors) and read_json(tensors[0].file.parent / "config.json").get("tie_word_embeddings") is True


def _check_index(path: Path, files: Mapping[str, str]) -> None:
    """A server that finds an index reads by it."""
    index = path / "model.safetensors.index.json"
    if index.exists() and read_json(index).get("weight_map") != files:
        raise EngineRejected(f"{index} does not name the tensors that are there")
