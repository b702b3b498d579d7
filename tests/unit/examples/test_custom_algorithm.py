"""The examples of an advantage and a loss of one's own do what they say, in the trainer's hands."""

from __future__ import annotations

import pytest
import torch

from algorithms.advantages import Group, dr_grpo
from algorithms.policy_loss import PolicyTokens
from examples.custom_algorithm.advantage import brief
from examples.custom_algorithm.loss import soft_gate


def group(rewards: list[float], tokens: list[int]) -> Group:
    lengths = torch.tensor(tokens)
    return Group(torch.tensor(rewards, dtype=torch.float64), lengths, torch.ones_like(lengths))


def tokens(log_ratio: torch.Tensor, advantage: torch.Tensor) -> PolicyTokens:
    zeros = torch.zeros_like(advantage)
    return PolicyTokens(log_ratio.requires_grad_(), zeros, zeros, advantage, zeros, zeros.long())


def test_of_two_right_answers_the_shorter_is_better_and_both_beat_a_wrong_one() -> None:
    advantages = brief(group([1.0, 1.0, 0.0], [10, 20, 5])).tolist()
    assert advantages[0] > advantages[1] > 0 > advantages[2]


def test_equal_lengths_change_nothing() -> None:
    same = group([1.0, 0.0], [7, 7])
    torch.testing.assert_close(brief(same), dr_grpo(same.reward_S))


def test_on_policy_the_soft_gate_has_the_policy_gradient() -> None:
    advantage = torch.tensor([2.0, -3.0])
    given = tokens(torch.zeros(2), advantage)
    (gradient,) = torch.autograd.grad(soft_gate(given).sum(), given.logprob_N)
    torch.testing.assert_close(gradient, -advantage)


@pytest.mark.parametrize("log_ratio", [-1.0, 1.0])
def test_off_policy_the_gate_closes_smoothly(log_ratio: float) -> None:
    given = tokens(torch.full((1,), log_ratio), torch.ones(1))
    (gradient,) = torch.autograd.grad(soft_gate(given).sum(), given.logprob_N)
    plain = -torch.tensor(log_ratio).exp().item()  # of the ratio without a gate
    assert plain < gradient.item() < 0
