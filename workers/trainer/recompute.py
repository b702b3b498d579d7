"""Activation checkpointing: of a layer only its input is kept, and the backward pass computes it a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from storage.errors import ConfigError


def recompute_layers(model: torch.nn.Module, *, reentrant: bool) -> None:
    """``reentrant``: the way that copes with weights that come and go, as with ZeRO stage 3.

    The layers are wrapped here, not by transformers, whose switch acts on models in training mode only; there, dropout
    would act too. Raises :class:`ConfigError` if the model has no layers that can be computed again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.activation_checkpointing: {type(model).__name__} has no layers that can be recomputed: "
            "set it to false"
        )
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, reentrant)


def _forward(forward: Callable[..., Any], reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = partial(forward, **kwargs)
    return checkpoint(again, *args, use_reentrant=reentrant, preserve_rng_state=False)
