"""Whether a run fits into this machine's memory, by an estimate that errs on the small side.

What it refuses cannot work; what it lets pass may still be tight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import psutil

from cli.runfile import Location
from workflows.scheduling.pipeline import trainer_ranks
from workflows.spec import ModelSpec, NodeSpec, RunSpec

BYTES = {"float32": 4, "bfloat16": 2}
BASE_BYTES = 400 << 20
"""torch with an empty model."""
SERVER_BYTES = 1600 << 20
"""The processes of a real engine server with an empty model."""


def check_memory(spec: RunSpec) -> Iterator[tuple[Location, str]]:
    """Compare the nodes' engines and ranks, all on this machine, with its memory (or this container's)."""
    try:
        parameters = count_parameters(Path(spec.model.path))
        need = sum(node_bytes(spec, node, parameters) for node in spec.nodes)
    except (OSError, ValueError):
        return  # the model check tells what is wrong with the files
    available = memory_limit()
    if need > available:
        yield (
            ("nodes",),
            f"{len(spec.nodes)} nodes need about {_gib(need)} ({parameters / 1e6:.0f} M parameters), this machine has "
            f"{_gib(available)}: take fewer nodes, fewer ranks, a smaller engine.kv_tokens or model.dtype bfloat16",
        )


def node_bytes(spec: RunSpec, node: NodeSpec, parameters: int) -> int:
    """Bytes of the node's processes; its engine stays resident beside its ranks.

    Critic and reference are taken to be of the model's size.
    """
    weights = parameters * BYTES[spec.model.dtype]
    total = 0
    if "rollout" in node.tags:
        base = SERVER_BYTES if spec.engine.kind in ("sglang", "vllm") else BASE_BYTES
        total += base + weights + spec.engine.kv_tokens * kv_bytes_per_token(spec.model)
    apart = set(spec.algorithm.companions_apart)
    held = set(spec.algorithm.companions) - apart
    if "train" in node.tags:
        gang = trainer_ranks(spec)
        trained = 2 if "critic" in held else 1
        frozen = _kept_bytes(spec, weights, gang) if "reference" in held else 0
        total += node.ranks * (BASE_BYTES + trained * _trained_bytes(spec, parameters, gang) + frozen)
    if "critic" in node.tags & apart:
        gang = sum(other.ranks for other in spec.nodes if "critic" in other.tags)
        total += node.ranks * (BASE_BYTES + _trained_bytes(spec, parameters, gang))
    if "reference" in node.tags & apart:
        total += node.ranks * (BASE_BYTES + _kept_bytes(spec, weights, node.ranks))
    return total


def _trained_bytes(spec: RunSpec, parameters: int, gang: int) -> int:
    """Of one rank for one model that is trained by so many.

    Master weights and two Adam moments in float32. A rank that starts has the weights whole at every stage.
    """
    weights = parameters * BYTES[spec.model.dtype]
    states = 12 * parameters if spec.model.dtype == "bfloat16" else 8 * parameters
    gradients = weights // gang if spec.trainer.zero_stage >= 2 else weights
    return weights + gradients + states // (gang if spec.trainer.zero_stage else 1)


def _kept_bytes(spec: RunSpec, weights: int, gang: int) -> int:
    """Of one rank for one model that never changes."""
    return weights // gang if spec.trainer.zero_stage == 3 else weights


def count_parameters(folder: Path) -> int:
    """Elements in the safetensors files, read from their headers. Raises :class:`ValueError` on a broken header."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < 100 << 20:
                raise ValueError(f"{path} is no safetensors file")
            header = json.loads(file.read(length))
        count += sum(math.prod(item["shape"]) for name, item in header.items() if name != "__metadata__")
    return count


def kv_bytes_per_token(model: ModelSpec) -> int:
    """Keys and values of one token over all layers; 0 if config.json does not say."""
    config = json.loads((Path(model.path) / "config.json").read_text())
    layers, heads = config.get("num_hidden_layers", 0), config.get("num_attention_heads", 0)
    if not layers or not heads:
        return 0
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return int(2 * layers * config.get("num_key_value_heads", heads) * head_dim * BYTES[model.dtype])


def memory_limit() -> int:
    """Bytes of memory here: the machine's, or the control group's limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
