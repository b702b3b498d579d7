"""Attention in a tree of tokens: each attends to its ancestors and itself, and nothing else is computed.

``end_T`` says where the descendants of each token end: query q sees key k if ``k <= q < end_T[k]``. Written depth
first, the pairs that see each other are triangles on the diagonal, one per run of tokens without a turn, and rectangles
below: the descendants of a token against the run up to it. So no key is gathered, no mask is held, and a plain sequence
is one triangle, computed as by any other model.

On the CPU each block is one call of torch's flash kernel, which also gives the log of each query's normaliser; outputs
of several blocks are averaged by these, as in ring attention (arXiv 2310.01889). Given the final output and normaliser
the backward kernel returns a block's exact part of the gradient. On a GPU FlexAttention gets the same pairs as a mask.

Shape suffixes: ``T`` tokens, ``H`` query heads, ``G`` key heads, ``D`` head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from storage.errors import ConfigError
from workers.trainer.tree import Indices

NAME = "ancestors"
"""Of :func:`ancestor_attention` among the attention functions of transformers."""

_TILE = 128
"""FlexAttention's block size."""
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(NamedTuple):
    """Queries that see all of some keys; ``causal``: those up to themselves, queries and keys being the same tokens."""

    queries: slice
    keys: slice
    causal: bool


def blocks(end_T: Indices) -> list[Block]:
    """What a tree attends to, each pair of tokens once. Triangles first: between them they hold every query."""
    triangles, rectangles = [], []
    # A token is the child of the one in front of it, unless that one's descendants end there.
    turns = np.flatnonzero(end_T[:-1] == np.arange(1, len(end_T))) + 1
    for start, stop in itertools.pairwise([0, *turns.tolist(), len(end_T)]):
        run = slice(start, stop)
        triangles.append(Block(run, run, causal=True))
        reach = stop
        for end in np.unique(end_T[run]).tolist():
            if end > stop:
                seen = int((end_T[run] >= end).sum())
                rectangles.append(Block(slice(reach, end), slice(start, start + seen), causal=False))
                reach = end
    return triangles + rectangles


def ancestor_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree: Sequence[Block] | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers for the CPU. query (1, H, T, D), key and value (1, G, T, D), output
    (1, T, H, D). ``tree`` is what :func:`blocks` gave; it is passed to the model's forward. None: a plain sequence.

    Raises :class:`ConfigError` if the model wants more of its attention than softmax(scale Q K) V.
    """
    extras = {"attention_mask": attention_mask, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    unknown = [name for name, value in extras.items() if value is not None] + ["dropout"] * bool(dropout)
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} computes attention with {', '.join(unknown)}, which tree rows cannot: "
            "set trainer.rows to paths"
        )
    whole = slice(0, query.shape[2])
    tree = tree or [Block(whole, whole, causal=True)]
    output: Tensor = _BlockAttention.apply(query, key, value, scaling, tree)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


def flex_mask(end_T: Tensor) -> BlockMask:
    """The same attention for FlexAttention, on the device of ``end_T``; memory is (T / 128)^2, not T^2."""
    tokens = len(end_T)
    starts = torch.arange(0, tokens, _TILE, device=end_T.device)
    stops = (starts + _TILE).clamp(max=tokens)
    padded = torch.nn.functional.pad(end_T, (0, -tokens % _TILE), value=-1).view(-1, _TILE)
    latest = padded.amax(1)
    earliest = padded.masked_fill(padded < 0, tokens).amin(1)
    below = starts[:, None] >= stops[None, :]
    some = (below & (latest[None, :] > starts[:, None])) | torch.eye(len(starts), dtype=torch.bool, device=end_T.device)
    full = below & (earliest[None, :] >= stops[:, None])

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_T[k])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full), *_listed(full), BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles has, and which, those first; int32 (1, 1, rows) and (1, 1, rows, rows)."""
    order = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tree: Sequence[Block]) -> Tensor:
        """(1, H, T, D) -> (1, H, T, D)."""
        output: Tensor
        if len(tree) == 1:
            output, normaliser = _forward(query, key, value, 0.0, True, scale=scale)
        else:
            output, normaliser = _merged(query, key, value, scale, tree)
        ctx.save_for_backward(query, key, value, output, normaliser)
        ctx.scale, ctx.tree = scale, tree
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normaliser = ctx.saved_tensors
        if len(ctx.tree) == 1:
            parts = _backward(gradient, query, key, value, output, normaliser, 0.0, True, scale=ctx.scale)
            return *parts, None, None
        totals = [torch.zeros_like(t, dtype=torch.float32) for t in (query, key, value)]
        for q, k, causal in ctx.tree:
            parts = _backward(
                gradient[:, :, q],
                query[:, :, q],
                key[:, :, k],
                value[:, :, k],
                output[:, :, q],
                normaliser[:, :, q],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for total, where, part in zip(totals, (q, k, k), parts, strict=True):
                total[:, :, where] += part
        return *(total.to(t.dtype) for total, t in zip(totals, (query, key, value), strict=True)), None, None


def _merged(query: Tensor, key: Tensor, value: Tensor, scale: float, tree: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """Outputs (1, H, T, D) and normalisers (1, H, T) over all blocks."""
    outputs = torch.empty_like(query, dtype=torch.float32)
    normalisers = torch.empty(query.shape[:3], dtype=torch.float32)
    for q, k, causal in tree:
        output, normaliser = _forward(query[:, :, q], key[:, :, k], value[:, :, k], 0.0, causal, scale=scale)
        if causal:
            outputs[:, :, q], normalisers[:, :, q] = output, normaliser
        else:
            before = normalisers[:, :, q]
            share = torch.sigmoid(normaliser - before)  # of this block in both: exp(a) / (exp(a) + exp(b))
            outputs[:, :, q].lerp_(output.float(), share[..., None])
            normalisers[:, :, q] = torch.logaddexp(before, normaliser)
    return outputs.to(query.dtype), normalisers


AttentionInterface.register(NAME, ancestor_attention)
