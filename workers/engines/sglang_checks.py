"""What is known and checked of a real SGLang server before anything is sent to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import EngineProtocolError
from workers.engines.checkpoint import read_json

OLDEST = (0, 5, 21)
"""The first release with all of: version spans, ``/ready``, ``begin_weight_update``."""
RESERVED = 8
"""Positions of its context length that the server keeps for itself: a prompt leaves seven of them, an answer two, and
what goes further is cut short without a word. The launcher adds them, the adapter takes them off."""
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
        max_context=_usable_context(server, config),
        dtype=str(server["dtype"]),
        device=str(server["device"]),
        tensor_parallel=int(server["tp_size"]),
        data_parallel=int(server["dp_size"]),
        memory_saver=bool(server.get("enable_memory_saver")),
        deterministic=bool(server.get("enable_deterministic_inference")),
    )


def _usable_context(server: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    context = int(server["context_length"] or config["max_position_embeddings"])
    return min(context, int(server["max_total_num_tokens"])) - RESERVED
