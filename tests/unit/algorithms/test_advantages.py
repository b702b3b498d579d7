"""Advantages against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms.advantages import group_advantages


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 0.5; squared deviations 4 x 0.25, unbiased variance 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([expected, -expected, -expected, expected]))


def test_dr_grpo_only_subtracts_the_mean() -> None:
    found = group_advantages(torch.tensor([3.0, 0.0, 0.0]), divide_by_std=False)
    torch.testing.assert_close(found, torch.tensor([2.0, -1.0, -1.0]))


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("reward", [0.1, -7.3, 0.0, 1e30])
def test_equal_rewards_give_exactly_zero(reward: float, divide: bool) -> None:
    found = group_advantages(torch.full((7,), reward, dtype=torch.float64), divide_by_std=divide)
    assert found.tolist() == [0.0] * 7


def test_advantages_do_not_depend_on_shift_and_with_division_hardly_on_scale() -> None:
    reward = torch.tensor([0.2, 0.9, 0.4, 0.4], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(reward + 100), group_advantages(reward))
    torch.testing.assert_close(group_advantages(reward * 50), group_advantages(reward), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, float("nan")], [float("inf"), 0.0]])
def test_a_group_that_has_no_statistics_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least two rewards|finite"):
        group_advantages(torch.tensor(rewards))
