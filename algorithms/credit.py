"""Credit along the tree of a session: each trained token once, however many leaves it leads to.

A token's children are the trained tokens that come next on the trajectories through it: one in a plain session, several
where the session branches (a sub-agent, a retried turn, a rewritten history). What a token can expect is the mean of
what its children can, weighted by the loss weight behind each: in how many leaves a branch ends does not matter.

Shape suffix: ``N`` trained tokens of any number of sessions; a parent stands in front of its children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeCredit(NamedTuple):
    """What :func:`tree_advantages` gives for each token, float32."""

    advantage_N: Tensor
    return_N: Tensor
    """``advantage + value``: what the critic is trained towards."""


def tree_advantages(
    reward_N: Tensor, value_N: Tensor, parent_N: Tensor, weight_N: Tensor, discount_N: Tensor, decay_N: Tensor
) -> TreeCredit:
    """Generalized advantage estimation over trees; on a chain it is GAE.

    With children ``c`` of token ``t`` and ``p_c`` the share of ``c``'s subtree in the loss weight behind ``t``::

        delta_t = r_t + sum_c p_c g_c V_c - V_t
        A_t     = delta_t + sum_c p_c g_c l_c A_c

    ``value_N`` is of the state in front of the token; behind a token without children it is 0. ``parent_N`` (int64) is
    the index of the parent, -1 for none. ``discount_N`` (g) and ``decay_N`` (l) belong to the step from the parent into
    the token: per token they are constants, per turn they differ from 1 only where a turn begins, so that a long answer
    is not discounted more than a short one.

    Source: GAE (arXiv 1506.02438) equation 16. Takes time linear in N, on the CPU, in float64.
    Raises :class:`ValueError` if a parent does not stand in front of its child.
    """
    if bool((parent_N >= torch.arange(len(parent_N))).any()):
        raise ValueError("each parent must stand in front of its children")
    parent, share = parent_N.tolist(), _shares(parent_N, weight_N)
    step_N = share * discount_N.double()
    into, kept = step_N.tolist(), (step_N * decay_N.double()).tolist()
    value, advantage = value_N.double().tolist(), (reward_N.double() - value_N.double()).tolist()
    for token in range(len(parent) - 1, -1, -1):  # children first
        if (above := parent[token]) >= 0:
            advantage[above] += into[token] * value[token] + kept[token] * advantage[token]
    advantage_N = torch.tensor(advantage, dtype=torch.float64)
    return TreeCredit(advantage_N.float(), (advantage_N + value_N).float())


def tree_returns(reward_N: Tensor, parent_N: Tensor, weight_N: Tensor, discount_N: Tensor) -> Tensor:
    """Discounted rewards from each token on: ``G_t = r_t + sum_c p_c g_c G_c``, see :func:`tree_advantages`."""
    nothing_N, all_N = torch.zeros_like(reward_N), torch.ones_like(reward_N)
    return tree_advantages(reward_N, nothing_N, parent_N, weight_N, discount_N, all_N).return_N


def leaves(parent_N: Tensor) -> Tensor:
    """True for tokens without children: where the reward of a session arrives.

    >>> leaves(torch.tensor([-1, 0, 1, 0]))
    tensor([False, False,  True,  True])
    """
    leaf_N = torch.ones(len(parent_N), dtype=torch.bool)
    leaf_N[parent_N[parent_N >= 0]] = False
    return leaf_N


def at_turns(factor: float, turn_N: Tensor, parent_N: Tensor) -> Tensor:
    """``factor`` for tokens that begin a turn behind another one, 1 for all others; for discounts per turn.

    >>> at_turns(0.5, torch.tensor([0, 0, 1, 1]), torch.tensor([-1, 0, 1, 2]))
    tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    begins_N = (parent_N >= 0) & (turn_N[parent_N.clamp(min=0)] != turn_N)
    return torch.where(begins_N, torch.tensor(factor, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))


def _shares(parent_N: Tensor, weight_N: Tensor) -> Tensor:
    """Of each token's subtree in the loss weight behind its parent; in equal parts where there is none behind it."""
    parent, below = parent_N.tolist(), weight_N.double().tolist()
    for token in range(len(parent) - 1, -1, -1):
        if parent[token] >= 0:
            below[parent[token]] += below[token]
    below_N = torch.tensor(below, dtype=torch.float64)
    inner_N = parent_N >= 0
    behind_N, children_N = torch.zeros(len(parent), dtype=torch.float64), torch.zeros(len(parent), dtype=torch.float64)
    behind_N.index_add_(0, parent_N[inner_N], below_N[inner_N])
    children_N.index_add_(0, parent_N[inner_N], torch.ones_like(below_N[inner_N]))
    total_N, count_N = behind_N[parent_N.clamp(min=0)], children_N[parent_N.clamp(min=0)]
    return torch.where(total_N > 0, below_N / total_N, 1.0 / count_N.clamp(min=1))
