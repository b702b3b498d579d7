"""Loss of the critic.

Shape suffix: ``N`` trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float | None) -> Tensor:
    """``max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2`` per token; differentiable in ``value_N``.

    ``clip`` None is plain regression. Source: PPO's implementations, "The 37 implementation details" (ICLR blog 2022),
    9; GAE (arXiv 1506.02438) section 5 asks for the same by a trust region.
    """
    loss_N = (value_N - return_N).square()
    if clip is not None:
        near_N = torch.minimum(torch.maximum(value_N, old_value_N - clip), old_value_N + clip)
        loss_N = torch.maximum(loss_N, (near_N - return_N).square())
    return loss_N / 2


def explained_variance(value_N: Tensor, return_N: Tensor) -> float:
    """``1 - var(G - V) / var(G)``: 1 for a perfect critic, 0 for a constant; 0 where the returns are equal."""
    if len(return_N) < 2 or not float(return_N.var()):
        return 0.0
    return 1.0 - float((return_N - value_N).double().var() / return_N.double().var())
