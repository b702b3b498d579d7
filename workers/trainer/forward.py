"""The forward pass of a micro-batch through a Hugging Face causal LM, and which models can compute one as a tree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.trainer.attention import NAME, blocks, flex_mask
from workers.trainer.packing import MicroBatch
from workers.trainer.tree import TokenTree

_PROBE = ((2, 3, 5, 7, 1), (2, 3, 5, 8, 6, 4, 9), (2, 6, 1))
"""Paths of the trial: they part twice, and once the shorter branch comes second."""


def use_trees(model: Any, device: torch.device) -> str | None:
    """Give a model the attention that trees need. None, or why it cannot compute trees; then it is left as it was.

    Layers with a window or a state look past a token's ancestors: their configuration tells. What else a model may do
    with its neighbours, a small tree tells, whose logits must be those of its paths alone.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has {' and '.join(sorted(kinds - {'full_attention'}))} layers"
    if getattr(model, "_is_stateful", False):
        return "it carries a state from token to token"
    if getattr(config, "sliding_window", None) is not None and getattr(config, "layer_types", None) is None:
        return "its attention has a window"
    before, wanted = config._attn_implementation, NAME if device.type == "cpu" else "flex_attention"
    try:
        model.set_attn_implementation(wanted)
        error = _probe(model, device) if config._attn_implementation == wanted else "its attention is its own"
    except Exception as failure:  # noqa: BLE001 - whatever a model raises, it has said that it cannot
        error = f"{type(failure).__name__}: {failure}"
    if error is not None:
        model.set_attn_implementation(before)
        return f"a tree of three paths went wrong ({error})"
    return None


def arguments(batch: MicroBatch, device: torch.device, *, trees: bool) -> dict[str, Any]:
    """Of a model's forward; it returns logits (1, K, V). Without ``trees`` the batch must be plain."""
    given: dict[str, Any] = {
        "input_ids": to(device, batch.ids_T)[None],
        "position_ids": to(device, batch.depth_T)[None],
        # Of the predictors only: the vocabulary projection of a prompt would be computed for nothing.
        "logits_to_keep": to(device, batch.predictor_K),
        "use_cache": False,
    }
    return given | (_attention(batch.end_T, device) if trees else {})


def logits_of(model: Any, batch: MicroBatch, device: torch.device, *, trees: bool) -> Tensor:
    """Logits (N, V) that predict the trained tokens."""
    logits_KV: Tensor = model(**arguments(batch, device, trees=trees)).logits[0]
    if len(batch.predictor_N) == len(batch.predictor_K) and (np.diff(batch.predictor_N) == 1).all():
        return logits_KV
    return logits_KV[to(device, batch.predictor_N)]


def to(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(device)


def _attention(end_T: npt.NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"tree": blocks(end_T)}
    return {"attention_mask": flex_mask(to(device, end_T))}


@torch.no_grad()
def _probe(model: Any, device: torch.device) -> str | None:
    paths = [np.array(path, np.int32) for path in _PROBE]
    merged, alone = TokenTree(paths), [TokenTree([path]) for path in paths]

    def logits(tree: TokenTree) -> Tensor:
        ids, depth = to(device, tree.ids_T.astype(np.int64)), to(device, tree.depth_T)
        output = model(input_ids=ids[None], position_ids=depth[None], use_cache=False, **_attention(tree.end_T, device))
        result: Tensor = output.logits[0].float()
        return result

    together = logits(merged)
    gap = max(
        float((together[to(device, merged.positions(n))] - logits(tree)).abs().max()) for n, tree in enumerate(alone)
    )
    bound = math.sqrt(torch.finfo(model.dtype).eps) * float(together.std())
    return None if gap <= bound else f"logits differ by {gap:.3g}, of {bound:.3g} allowed"
