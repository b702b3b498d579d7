"""Distributions of a step in a few figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.trainer.distributions import bins, quantiles, ratio_quantiles, staleness_shares

LOG_RATIOS = st.lists(st.floats(-3.9, 3.9), min_size=1, max_size=200)


@given(LOG_RATIOS)
def test_quantiles_of_the_ratio_are_right_to_half_a_percent(log_ratios: list[float]) -> None:
    values = np.array(log_ratios)
    found = ratio_quantiles(bins(values))
    for part in (1, 50, 99):
        exact = np.exp(np.quantile(values, part / 100, method="inverted_cdf"))
        assert found[f"importance_p{part:02d}"] == pytest.approx(exact, rel=0.0051)


@given(LOG_RATIOS, LOG_RATIOS)
def test_counts_of_micro_batches_and_ranks_add_up(one: list[float], other: list[float]) -> None:
    assert (bins(np.array(one)) + bins(np.array(other))).tolist() == bins(np.array(one + other)).tolist()


def test_a_ratio_beyond_the_bins_is_counted_in_the_outermost() -> None:
    found = ratio_quantiles(bins(np.array([-50.0, 0.0, 50.0])))
    assert found == pytest.approx({"importance_p01": np.exp(-4), "importance_p50": 1.0, "importance_p99": np.exp(4)})


def test_a_step_without_tokens_has_figures_too() -> None:
    assert ratio_quantiles(bins(np.empty(0))) == {"importance_p01": 1.0, "importance_p50": 1.0, "importance_p99": 1.0}
    assert set(staleness_shares(np.empty(0, np.int32)).values()) == {0.0}
    assert set(quantiles("reward", np.empty(0)).values()) == {0.0}


@given(st.lists(st.integers(0, 9), min_size=1))
def test_shares_by_staleness_sum_to_one(ages: list[int]) -> None:
    shares = staleness_shares(np.array(ages))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["staleness_1"] == ages.count(1) / len(ages)


def test_quantiles_lie_between_neighbours() -> None:
    found = quantiles("reward", np.array([0.0, 1.0]))
    assert found == pytest.approx({"reward_p10": 0.1, "reward_p50": 0.5, "reward_p90": 0.9, "reward_max": 1.0})
