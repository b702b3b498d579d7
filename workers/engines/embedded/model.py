"""Forward pass over rows of a dense KV cache.

Legend: N rows, T new tokens a row, L cached length, Q query heads, K key/value heads, G = Q / K, D head dim, H hidden.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engines.embedded.architectures import ModelConfig, Rope
from workers.engines.embedded.weights import Layer, Weights


class KvRows:
    """Keys and values of the running sequences, one row each, grown on demand.

    Dense rows need no gather at each decode step; sequences share prefixes by copying them in once
    (:mod:`workers.engines.embedded.prefix_cache`).
    """

    _STEP = 64

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self.data = self._allocate(0, 0)  # [layers, 2, rows, tokens, K, D]

    def ensure(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens; the content stays."""
        have_rows, have_tokens = self.data.shape[2], self.data.shape[3]
        if rows <= have_rows and tokens <= have_tokens:
            return
        new_rows = max(have_rows, 1 << (rows - 1).bit_length())
        new_tokens = have_tokens
        if tokens > have_tokens:
            new_tokens = -(-max(tokens, have_tokens * 3 // 2) // self._STEP) * self._STEP
        grown = self._allocate(new_rows, new_tokens)
        grown[:, :, :have_rows, :have_tokens] = self.data
        self.data = grown

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of tokens [start, end): [layers, 2, end - start, K, D]."""
        return self.data[:, :, row, start:end].clone()

    def write(self, row: int, start: int, segment: Tensor) -> None:
        """Put a segment as returned by :meth:`read` at ``start``."""
        self.data[:, :, row, start : start + segment.shape[2]] = segment

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of one row over another."""
        if source != target:
            self.data[:, :, target, :tokens] = self.data[:, :, source, :tokens]

    def free(self) -> None:
        """Give the memory back; the content is lost."""
        self.data = self._allocate(0, 0)

    def _allocate(self, rows: int, tokens: int) -> Tensor:
        c = self._config
        # Masked positions get weight 0, and 0 times a NaN of fresh memory would be NaN: hence zeros.
        return torch.zeros(c.layers, 2, rows, tokens, c.kv_heads, c.head_dim, dtype=self._dtype)


class Forward:
    """Runs the model; holds nothing but constants, so weights can change between two calls."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_context: int) -> None:
        self._config = config
        angles = torch.outer(torch.arange(max_context, dtype=torch.float32), inverse_frequencies(config))
        self._cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)  # [max_context, D]
        # The sign of rotate_half is folded into the sine.
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self._dtype = dtype

    def __call__(
        self, weights: Weights, kv: KvRows, first_row: int, ids: Tensor, starts: Tensor, length: int
    ) -> Tensor:
        """Compute new tokens of rows ``first_row`` and on, writing their keys and values.

        Args:
            ids: [N, T]; rows with fewer new tokens are padded on the right: what padding writes lies behind the row's
                end, where no query looks before the true token has overwritten it.
            starts: [N], tokens already in each row.
            length: max(starts) + T.

        Returns:
            hidden states [N, T, H] before the final norm.
        """
        n, t = ids.shape
        positions = starts.unsqueeze(1) + torch.arange(t)  # [N, T]
        rows = torch.arange(first_row, first_row + n).unsqueeze(1)  # [N, 1]
        cos, sin = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)  # [N, T, 1, D]
        mask = self._mask(positions, length)
        x = weights.embed(ids.reshape(-1))  # [N T, H]
        cache = kv.data[:, :, :, :length]
        for layer, (keys, values) in zip(weights.layers, cache.unbind(0), strict=True):
            x = self._attend(layer, x, n, cos, sin, keys, values, rows, positions, mask)
            x = self._mlp(layer, x)
        return x.view(n, t, -1)

    def logits(self, weights: Weights, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 logits [N, V]"""
        return torch.mm(self._norm(hidden, weights.norm), weights.head).float()

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """Additive causal mask [N, 1, G T, L]."""
        n, t = positions.shape
        hidden = torch.arange(length) > positions.unsqueeze(2)  # [N, T, L]
        mask = torch.zeros(n, t, length, dtype=self._dtype).masked_fill_(hidden, -math.inf)
        groups = self._config.heads // self._config.kv_heads
        return mask.unsqueeze(1).expand(n, groups, t, length).reshape(n, 1, groups * t, length)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)

    def _attend(
        self,
        layer: Layer,
        x: Tensor,
        n: int,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        c = self._config
        t = positions.shape[1]
        qkv = _project(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(n, t, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = qkv[:, :, : -c.kv_heads], qkv[:, :, -c.kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (c.head_dim,), None, c.norm_eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, torch.roll(qk, c.head_dim // 2, -1), sin)
        q, k = qk[:, :, : c.heads], qk[:, :, c.heads :]
        keys.index_put_((rows, positions), k)
        values.index_put_((rows, positions), v)
        first = int(rows[0, 0])
        out = F.scaled_dot_product_attention(
            # Grouped queries stand as further query positions of their key/value head: nothing is repeated.
            q.reshape(n, t, c.kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4).reshape(n, c.kv_heads, -1, c.head_dim),
            keys[first : first + n].transpose(1, 2),
            values[first : first + n].transpose(1, 2),
            attn_mask=mask,
        )
        out = out.view(n, c.kv_heads, -1, t, c.head_dim).permute(0, 3, 1, 2, 4).reshape(n * t, -1)
        return _add_projection(x, out, layer.out, layer.out_bias)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = _project(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return _add_projection(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_projection(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out.add_(bias)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [D / 2] by the formulas of ``transformers.modeling_rope_utils``."""
    rope = config.rope
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (rope.theta**steps)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    context = rope.original_max_position
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    result = torch.where(wavelengths > context / rope.low_freq_factor, frequencies / rope.factor, frequencies)
    is_between = (wavelengths <= context / rope.low_freq_factor) & (wavelengths >= context / rope.high_freq_factor)
    return torch.where(is_between, between, result)
