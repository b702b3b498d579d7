"""A checkpoint's tensors as the forward pass wants them: transposed for ``x @ w``, projections of one input fused.

Transposed, a CPU matrix product with few rows runs about 1.7 times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from storage.errors import EngineRejected
from workers.engines.checkpoint import check_headers, verified_digest, weight_files
from workers.engines.embedded.architectures import ModelConfig, read_config


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. H hidden, Q query heads, K key/value heads, D head dim, F intermediate."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [H, (Q + 2K) D]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [Q + K, D]
    out: Tensor  # [Q D, H]
    out_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [H, 2F]
    gate_up_bias: Tensor | None
    down: Tensor  # [F, H]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of one weight version."""

    config: ModelConfig
    digest: str
    """By the rule of the weights store."""
    embedding: Tensor | None  # [V, H]; None: tied, columns of ``head``
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    head: Tensor  # [H, V]

    def embed(self, ids: Tensor) -> Tensor:
        """ids [N] -> [N, H]"""
        if self.embedding is None:
            return self.head.index_select(1, ids).t().contiguous()
        return self.embedding.index_select(0, ids)


def load(directory: Path, *, dtype: torch.dtype, compute: torch.dtype, expected: ModelConfig | None = None) -> Weights:
    """Read, verify and lay out the checkpoint in ``directory``.

    Args:
        dtype: the weights are rounded to it.
        compute: type of the tensors returned.
        expected: the shape that the model must have.

    Raises:
        EngineRejected: corrupt, incomplete, not finite, or of another shape.
    """
    config = read_config(directory)
    if expected is not None and config != expected:
        raise EngineRejected(f"{directory} is another model than the one served: {config} instead of {expected}")
    check_headers(directory)
    digest = verified_digest(directory)
    with ExitStack() as stack, torch.inference_mode():
        try:
            reader = _Reader(directory, stack, dtype, compute)
            weights = _assemble(reader, config, digest)
        except (SafetensorError, OSError) as error:
            raise EngineRejected(f"{directory}: {error}") from error
        reader.refuse_unread(ignored={"lm_head.weight"} if config.tied else set())
    return weights


class _Reader:
    """Takes tensors by name out of all files of a checkpoint."""

    def __init__(self, directory: Path, stack: ExitStack, dtype: torch.dtype, compute: torch.dtype) -> None:
        self._directory, self._dtype, self._compute = directory, dtype, compute
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            self._files.update(dict.fromkeys(file.keys(), file))
        self._unread = set(self._files)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            raise EngineRejected(f"{self._directory}: tensor {name} is missing")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise EngineRejected(f"{self._directory}: tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise EngineRejected(f"{self._directory}: tensor {name} holds NaN or infinity")
        self._unread.discard(name)
        return tensor.to(self._dtype).to(self._compute)

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._files else None

    def refuse_unread(self, ignored: set[str]) -> None:
        left = {name for name in self._unread - ignored if not name.endswith("rotary_emb.inv_freq")}
        if left:
            raise EngineRejected(f"{self._directory}: unexpected tensor {sorted(left)[0]} (and {len(left) - 1} more)")


def _assemble(reader: _Reader, config: ModelConfig, digest: str) -> Weights:
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, config.hidden)
    source = embedding if config.tied else reader.take("lm_head.weight", config.vocab_size, config.hidden)
    head = source.t().contiguous()
    return Weights(
        config=config,
        digest=digest,
        embedding=None if config.tied else embedding.clone(),
        layers=tuple(_layers(reader, config)),
        norm=reader.take("model.norm.weight", config.hidden).clone(),
        head=head,
    )


def _layers(reader: _Reader, config: ModelConfig) -> Iterator[Layer]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for index in range(config.layers):
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        projections = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        gates = (("gate_proj", config.intermediate), ("up_proj", config.intermediate))
        yield Layer(
            input_norm=reader.take(f"model.layers.{index}.input_layernorm.weight", config.hidden).clone(),
            qkv=_fused(reader, at, projections, config.hidden),
            qkv_bias=_fused_bias(reader, at, projections),
            qk_norm=_qk_norm(reader, at, config),
            out=reader.take(f"{at}.o_proj.weight", config.hidden, q).t().contiguous(),
            out_bias=reader.take_if_there(f"{at}.o_proj.bias", config.hidden),
            post_norm=reader.take(f"model.layers.{index}.post_attention_layernorm.weight", config.hidden).clone(),
            gate_up=_fused(reader, mlp, gates, config.hidden),
            gate_up_bias=_fused_bias(reader, mlp, gates),
            down=reader.take(f"{mlp}.down_proj.weight", config.hidden, config.intermediate).t().contiguous(),
            down_bias=reader.take_if_there(f"{mlp}.down_proj.bias", config.hidden),
        )


def _fused(reader: _Reader, prefix: str, parts: tuple[tuple[str, int], ...], inputs: int) -> Tensor:
    return torch.cat([reader.take(f"{prefix}.{name}.weight", size, inputs) for name, size in parts]).t().contiguous()


def _fused_bias(reader: _Reader, prefix: str, parts: tuple[tuple[str, int], ...]) -> Tensor | None:
    biases = [reader.take_if_there(f"{prefix}.{name}.bias", size) for name, size in parts]
    present = [bias for bias in biases if bias is not None]
    if present and len(present) < len(parts):
        raise EngineRejected(f"{prefix}: {len(present)} of {len(parts)} fused projections have a bias")
    return torch.cat(present) if present else None


def _qk_norm(reader: _Reader, prefix: str, config: ModelConfig) -> Tensor | None:
    if not config.qk_norm:
        return None
    query = reader.take(f"{prefix}.q_norm.weight", config.head_dim).expand(config.heads, -1)
    key = reader.take(f"{prefix}.k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
    return torch.cat([query, key])
