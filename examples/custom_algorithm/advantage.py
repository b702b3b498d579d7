"""An advantage of your own: among samples of equal reward the shorter is better.

In the run file: ``algorithm: {advantage: "examples.custom_algorithm.advantage:brief"}``.
"""

from torch import Tensor

from algorithms.advantages import Group, dr_grpo

COST = 0.1
"""Reward that the longest sample of a group loses."""


def brief(group: Group) -> Tensor:
    """One advantage per sample of one task."""
    length_S = group.tokens_S / group.tokens_S.max().clamp(min=1)
    return dr_grpo(group.reward_S - COST * length_S)
