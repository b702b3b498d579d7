"""Which models the embedded engine runs, read from ``config.json``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import EngineRejected
from workers.engines.checkpoint import read_json

SUPPORTED: frozenset[str] = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Values of ``architectures`` in ``config.json``."""

ROPE_TYPES: frozenset[str] = frozenset({"default", "linear", "llama3"})


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model with RMS norms, rotary positions, grouped-query attention and a gated SiLU MLP."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied: bool
    """The output projection is the embedding."""
    max_positions: int

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head."""
        return self.architecture == "Qwen3ForCausalLM"


def read_config(directory: Path) -> ModelConfig:
    """Parse ``config.json``; raises :class:`EngineRejected` for a model that the engine cannot run."""
    file = directory / "config.json"
    raw = read_json(file)
    try:
        return _parse(raw)
    except KeyError as error:
        raise EngineRejected(f"{file} has no {error.args[0]!r}") from None
    except (TypeError, ValueError, EngineRejected) as error:
        raise EngineRejected(f"{file}: {error}") from None


def read_stop_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``; may be empty."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            value = read_json(directory / name).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def _parse(raw: dict[str, Any]) -> ModelConfig:
    architecture = next(iter(raw.get("architectures") or []), None)
    if architecture not in SUPPORTED:
        raise EngineRejected(f"architecture {architecture!r} is not supported, only {', '.join(sorted(SUPPORTED))}")
    _refuse_variants(raw)
    heads = int(raw["num_attention_heads"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        intermediate=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=int(raw["max_position_embeddings"]),
    )


def _refuse_variants(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineRejected(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise EngineRejected("sliding window attention is not supported")
    if raw.get("quantization_config"):
        raise EngineRejected("quantised weights are not supported")


def _rope(raw: dict[str, Any]) -> Rope:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise EngineRejected(f"rope type {kind!r} is not supported, only {', '.join(sorted(ROPE_TYPES))}")
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(kind, theta)
    return Rope(
        kind,
        theta,
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )
