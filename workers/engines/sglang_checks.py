"""What is known and checked of a real SGLang server before anything is sent to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import EngineProtocolError, EngineRejected
from workers.engines.checkpoint import Stored, read_json, stored_tensors, verified_digest
from workers.engines.fingerprint import FLOATS, check_finite, expected_checksums

OLDEST = (0, 5, 21)
"""The first release with all of: version spans, ``/ready``, ``begin_weight_update``."""
PLAIN_LAYOUT = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures whose tensors the server holds as the files do, apart from fused projections."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server was started with; it does not change while it lives."""

    model_path: Path
    """The checkpoint that it was started from."""
    architecture: str
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    tensor_parallel: int
    data_parallel: int
    memory_saver: bool
    deterministic: bool

    @property
    def provable(self) -> bool:
        """Whether its checksums can be told from the files."""
        return (
            self.device == "cpu"
            and self.tensor_parallel == 1
            and self.architecture in PLAIN_LAYOUT
            and self.vocab_size % 64 == 0  # else the server pads the embedding
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that is fit to be loaded."""

    path: Path
    digest: str
    """By the rule of the weights store."""
    tensors: tuple[Stored, ...]

    def checksums(self, names: Sequence[str], dtype: str) -> dict[str, str]:
        return expected_checksums(names, self.tensors, dtype)


def examine(path: Path, served: Served) -> Checkpoint:
    """Refuse a checkpoint that the server could not load over what it serves: it would not survive it.

    Raises:
        EngineRejected: corrupt, incomplete, not finite, or of another model.
    """
    tensors = stored_tensors(path)
    _same_model(path, served.model_path)
    ours, theirs = _shapes(tensors), _shapes(stored_tensors(served.model_path))
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


def check_release(version: str) -> None:
    """Raises :class:`EngineProtocolError` for a release that is too old."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineProtocolError(f"SGLang {version} is too old: {oldest} or later is needed, run make engine-sglang")


def read_served(model: Mapping[str, Any], server: Mapping[str, Any]) -> Served:
    path = Path(model["tokenizer_path"])
    config = read_json(path / "config.json")
    return Served(
        model_path=path,
        architecture=(model.get("architectures") or [""])[0],
        vocab_size=int(config["vocab_size"]),
        max_context=int(server["context_length"] or config["max_position_embeddings"]),
        dtype=str(server["dtype"]),
        device=str(server["device"]),
        tensor_parallel=int(server["tp_size"]),
        data_parallel=int(server["dp_size"]),
        memory_saver=bool(server.get("enable_memory_saver")),
        deterministic=bool(server.get("enable_deterministic_inference")),
    )


def _same_model(path: Path, served: Path) -> None:
    """Shapes do not tell a change of head count or of an epsilon."""
    new, old = read_json(path / "config.json"), read_json(served / "config.json")
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
