"""Advantage estimators of one group, and what normalises advantages over a batch.

A group is all samples of one task. Statistics are per sample (session), never per leaf: a branching session would
otherwise count more than once. Computed in float64, returned as float32.

Shape suffixes: ``S`` samples of one group, ``N`` tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EPSILON = 1e-6


@dataclass(frozen=True)
class Group:
    """The samples of one task: what an estimator named by dotted path is called with, for one Tensor of shape (S,).

    *Example* ``Group(reward_S=tensor([1., 0.]), tokens_S=tensor([12, 40]), turns_S=tensor([2, 3]))``
    """

    reward_S: Tensor
    """float64; less the penalty where the KL to the reference is part of the reward."""
    tokens_S: Tensor
    """int64; trained tokens of the sample, each once however many leaves share it."""
    turns_S: Tensor
    """int64; answers of the model that have trained tokens."""


def zero_variance(reward_S: Tensor) -> bool:
    """Whether all rewards of a group are equal, so that it teaches nothing: the predicate of dynamic sampling.

    It must be asked of raw rewards: penalties would hide that no sample was better than another.
    Source: DAPO (arXiv 2503.14476) section 3.2.

    >>> zero_variance(torch.tensor([1.0, 1.0, 1.0]))
    True
    """
    return bool((reward_S == reward_S[0]).all())


def grpo(reward_S: Tensor) -> Tensor:
    """``(r - mean) / (std + 1e-6)`` with the unbiased standard deviation; exactly 0 where all rewards are equal.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2. Raises :class:`ValueError` for fewer than two rewards
    or one that is not finite, as do all estimators of a group.
    """
    centred_S = _centred(reward_S)
    return (centred_S / (reward_S.double().std() + _EPSILON)).float()


def dr_grpo(reward_S: Tensor) -> Tensor:
    """``r - mean``: dividing by the deviation would weight tasks by how nearly constant their rewards are.

    Source: Dr. GRPO (arXiv 2503.20783) section 3.2.

    >>> dr_grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return _centred(reward_S).float()


def rloo(reward_S: Tensor) -> Tensor:
    """``r - mean of the others``, which is ``S / (S - 1) (r - mean)``: an unbiased baseline.

    Source: RLOO (arXiv 2402.14740), after Kool et al. 2019.

    >>> rloo(torch.tensor([1.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    samples = len(reward_S)
    return (_centred(reward_S) * samples / max(samples - 1, 1)).float()


def whiten(advantage_N: Tensor) -> Tensor:
    """``(a - mean) / (std + 1e-6)`` over all trained tokens of the batch; 0 where they are equal.

    REINFORCE++ whitens returns, or with its baseline variant rewards less the group's mean, and no group deviation
    enters; PPO's implementations whiten what :func:`algorithms.credit.tree_advantages` gives.
    Sources: REINFORCE++ (arXiv 2501.03262); PPO, "The 37 implementation details" (ICLR blog 2022), 7.
    """
    if len(advantage_N) < 2 or zero_variance(advantage_N):
        return torch.zeros_like(advantage_N, dtype=torch.float32)
    advantage_N = advantage_N.double()
    return ((advantage_N - advantage_N.mean()) / (advantage_N.std() + _EPSILON)).float()


def _centred(reward_S: Tensor) -> Tensor:
    if reward_S.ndim != 1 or len(reward_S) < 2:
        raise ValueError(f"a group needs at least two rewards in one dimension, got shape {tuple(reward_S.shape)}")
    if not torch.isfinite(reward_S).all():
        raise ValueError(f"rewards must be finite numbers, got {reward_S.tolist()}")
    reward_S = reward_S.double()
    if zero_variance(reward_S):  # the mean of equal numbers need not equal them in floating point
        return torch.zeros_like(reward_S)
    return reward_S - reward_S.mean()
