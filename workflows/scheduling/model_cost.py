"""What a model costs per token, from its ``config.json``: parameters, KV bytes, FLOPs; dense and mixture of experts.

Formulas
    parameters of a layer   ``h*(q+2*kv)*d + q*d*h`` (attention) ``+ 3*h*f`` (gated MLP), one such MLP per expert and
                            ``h*E`` for their router; norms and biases, under 0.1 %, are left out
    FLOPs of a token        ``2*active + 4*layers*q*d*context``: each parameter one multiply-add, and the two products
                            of attention over the context (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)
    KV bytes of a token     ``2*layers*kv*d*bytes``
with h hidden, f MLP width, E experts, d head size, q and kv the numbers of query and KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.errors import ConfigError

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class ModelCost:
    """One model at one dtype. Counts are numbers of parameters, sizes are bytes.

    *Example*: Qwen3-8B has ``parameters=8.19e9``, ``kv_bytes_per_token=147456``, ``attention_width=4096``.
    """

    parameters: float
    active_parameters: float
    """Used for one token; fewer than ``parameters`` in a mixture of experts."""
    layers: int
    hidden: int
    attention_width: int
    """Query heads times head size."""
    kv_bytes_per_token: float
    bytes_per_parameter: float
    activation_bytes: float
    """Per number that is computed with and that the KV cache holds."""
    experts: int = 0
    """Per layer; 0: dense."""
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    """Part of ``parameters`` that lies in experts."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> ModelCost:
        """The cost of the model with this Hugging Face ``config.json`` (Llama, Qwen2, Qwen3, Qwen3-MoE, SmolLM2 ...).

        ``dtype``: computed and stored with it instead of the config's own.
        Raises :class:`ConfigError` for a missing number or an unknown dtype.
        """
        hidden, layers, heads = (_number(config, key) for key in _SIZES)
        head_size = int(config.get("head_dim") or hidden // heads)
        width, kv_width = heads * head_size, int(config.get("num_key_value_heads") or heads) * head_size
        attention = 2 * hidden * width + 2 * hidden * kv_width
        dense, per_expert, experts, used = _mlp(config, hidden, layers)
        embedding = _number(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
        shared = layers * attention + dense + embedding
        stored, computed = _bytes(config, dtype)
        return cls(
            parameters=shared + experts * per_expert,
            active_parameters=shared + used * per_expert,
            layers=layers,
            hidden=hidden,
            attention_width=width,
            kv_bytes_per_token=2 * layers * kv_width * computed,
            bytes_per_parameter=stored,
            activation_bytes=computed,
            experts=experts,
            experts_per_token=used,
            expert_parameters=experts * per_expert,
        )

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    def flops(self, tokens: float, context: float) -> float:
        """Of one forward pass of ``tokens`` tokens that attend to ``context`` tokens each, on average."""
        return tokens * (2 * self.active_parameters + 4 * self.layers * self.attention_width * context)

    def read_bytes(self, batch: float) -> float:
        """Weight bytes that a decode step of ``batch`` sequences reads.

        Of E experts of which each token picks k at random, a batch touches ``E*(1-(1-k/E)**batch)``.
        """
        if not self.experts:
            return self.weight_bytes
        touched = 1 - math.pow(1 - self.experts_per_token / self.experts, batch)
        return (self.parameters - (1 - touched) * self.expert_parameters) * self.bytes_per_parameter


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def _mlp(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[float, float, int, int]:
    """Parameters of all MLPs that every token uses, those of one expert in all sparse layers, experts, picked ones."""
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if not experts:
        return layers * 3 * hidden * _number(config, "intermediate_size"), 0.0, 0, 0
    plain = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    sparse = sum(layer not in plain and (layer + 1) % every == 0 for layer in range(layers))
    width = int(config.get("moe_intermediate_size") or _number(config, "intermediate_size"))
    dense = (layers - sparse) * 3 * hidden * int(config.get("intermediate_size") or 0) + sparse * hidden * experts
    return dense, sparse * 3 * hidden * width, experts, _number(config, "num_experts_per_tok")


def _bytes(config: Mapping[str, Any], dtype: str | None) -> tuple[int, int]:
    """Bytes of a stored parameter, and of a number computed with."""
    name = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if name not in BYTES:
        raise ConfigError(f"dtype {name!r} of the model is unknown; known: {', '.join(BYTES)}")
    quantized = dtype == "fp8" or (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    return (1, 2) if quantized else (BYTES[name], BYTES[name])


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json of the model: {key} is {value!r}; a whole number above 0 is needed")
    return value
