"""Advantages of a group: hand-computed values, and what holds for any rewards."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.advantages import dr_grpo, grpo, rloo, whiten, zero_variance

ESTIMATORS = [grpo, dr_grpo, rloo]
Estimator = Callable[[Tensor], Tensor]
rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16).map(lambda r: torch.tensor(r, dtype=torch.float64))


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 0.5; squared deviations 4 x 0.25, unbiased variance 1/3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    found = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([expected, -expected, -expected, expected]))


def test_dr_grpo_only_subtracts_the_mean() -> None:
    torch.testing.assert_close(dr_grpo(torch.tensor([3.0, 0.0, 0.0])), torch.tensor([2.0, -1.0, -1.0]))


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    found = rloo(torch.tensor([4.0, 1.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([4.0 - 1.0, 1.0 - 2.5, 1.0 - 2.5]))


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    # mean 2, unbiased variance (1 + 1 + 4 + 4 + 0) / 4
    found = whiten(torch.tensor([1.0, 3.0, 0.0, 4.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, -2.0, 2.0, 0.0]) / (math.sqrt(2.5) + 1e-6))


@pytest.mark.parametrize("values", [[], [3.0], [0.1, 0.1, 0.1]])
def test_whitening_what_has_no_deviation_gives_zeros(values: list[float]) -> None:
    assert whiten(torch.tensor(values, dtype=torch.float64)).tolist() == [0.0] * len(values)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(reward_S=rewards)
def test_advantages_of_a_group_sum_to_zero(estimator: Estimator, reward_S: Tensor) -> None:
    assert float(estimator(reward_S).double().sum()) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(reward_S=rewards)
def test_a_better_sample_never_has_a_lower_advantage(estimator: Estimator, reward_S: Tensor) -> None:
    order = torch.argsort(reward_S)
    assert bool((estimator(reward_S)[order].diff() >= 0).all())


@given(reward_S=rewards)
def test_rloo_is_dr_grpo_up_to_the_factor_of_its_own_sample(reward_S: Tensor) -> None:
    samples = len(reward_S)
    torch.testing.assert_close(rloo(reward_S), dr_grpo(reward_S) * samples / (samples - 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, -7.3, 0.0, 1e30])
def test_equal_rewards_give_exactly_zero(reward: float, estimator: Estimator) -> None:
    equal_S = torch.full((7,), reward, dtype=torch.float64)
    assert zero_variance(equal_S)
    assert estimator(equal_S).tolist() == [0.0] * 7


def test_rewards_that_differ_at_all_are_no_zero_variance_group() -> None:
    assert not zero_variance(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64))


def test_grpo_does_not_depend_on_shift_and_hardly_on_scale() -> None:
    reward = torch.tensor([0.2, 0.9, 0.4, 0.4], dtype=torch.float64)
    torch.testing.assert_close(grpo(reward + 100), grpo(reward))
    torch.testing.assert_close(grpo(reward * 50), grpo(reward), rtol=1e-4, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("values", [[1.0], [], [1.0, float("nan")], [float("inf"), 0.0]])
def test_a_group_that_has_no_statistics_is_refused(values: list[float], estimator: Estimator) -> None:
    with pytest.raises(ValueError, match=r"at least two rewards|finite"):
        estimator(torch.tensor(values))
