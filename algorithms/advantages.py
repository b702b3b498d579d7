"""Advantage estimators: one scalar per session, carried by each of its trained tokens, however many leaves it has.

Shape suffixes: ``S`` sessions (samples) of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-6


def group_advantages(reward_S: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Advantages relative to the group's own mean: GRPO, or Dr. GRPO without the division.

    ``(reward - mean) / (std + 1e-6)`` with the unbiased standard deviation; exactly 0 where all rewards are equal.
    Computed in float64, returned as float32. Statistics are per sample, never per leaf: a branching session
    would otherwise count more than once.

    Sources: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1; Dr. GRPO (arXiv 2503.20783), which shows
    that the division weights tasks by how nearly constant their rewards are.

    Raises :class:`ValueError` for fewer than two rewards or one that is not finite.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), divide_by_std=False)
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    if reward_S.ndim != 1 or len(reward_S) < 2:
        raise ValueError(f"a group needs at least two rewards in one dimension, got shape {tuple(reward_S.shape)}")
    if not torch.isfinite(reward_S).all():
        raise ValueError(f"rewards must be finite numbers, got {reward_S.tolist()}")
    reward_S = reward_S.double()
    if bool((reward_S == reward_S[0]).all()):  # the mean of equal numbers need not equal them in floating point
        return torch.zeros_like(reward_S, dtype=torch.float32)
    centred_S = reward_S - reward_S.mean()
    if divide_by_std:
        centred_S = centred_S / (reward_S.std() + _EPSILON)
    return centred_S.float()
