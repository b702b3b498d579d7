"""Measures over busy intervals, on hand-computed cases."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from storage.ledger import Interval
from storage.metrics import merge, overlap_fraction, pass_at, seconds


def train(node: str, start: float, end: float) -> Interval:
    return Interval(node, "train", start, end)


def generate(node: str, start: float, end: float) -> Interval:
    return Interval(node, "generate", start, end)


def test_overlapping_and_touching_stretches_are_one() -> None:
    assert merge([(4, 5), (0, 2), (1, 3), (3, 4), (7, 7), (9, 8)]) == [(0, 5)]


def test_training_beside_a_generating_node_overlaps() -> None:
    assert overlap_fraction([train("a", 0, 10)], [generate("b", 2, 6), generate("b", 5, 9)]) == pytest.approx(0.7)


def test_what_the_training_node_generated_itself_does_not_count() -> None:
    assert overlap_fraction([train("a", 0, 10)], [generate("a", 0, 10)]) == 0.0


def test_training_time_is_summed_over_nodes_and_steps() -> None:
    trained = [train("a", 0, 4), train("a", 10, 14), train("b", 0, 4)]
    assert overlap_fraction(trained, [generate("c", 0, 4), generate("b", 12, 14)]) == pytest.approx(10 / 12)


def test_without_training_there_is_no_fraction() -> None:
    assert overlap_fraction([], [generate("a", 0, 1)]) is None


def test_seconds_of_a_kind_are_of_one_node_or_of_any() -> None:
    intervals = [generate("a", 0, 2), generate("b", 1, 4), train("a", 8, 9)]
    assert seconds(intervals, "generate") == 4
    assert seconds(intervals, "generate", "a") == 2
    assert seconds(intervals, "train", "b") == 0


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    tasks = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.5, 1.0, 1.0, 1.0]]
    for k in (1, 2, 3, 4):
        chances = [fmean(max(chosen) >= 1.0 for chosen in combinations(rewards, k)) for rewards in tasks]
        assert pass_at(k, tasks, 1.0) == pytest.approx(fmean(chances))


def test_a_task_with_fewer_rewards_than_k_has_no_estimate() -> None:
    assert pass_at(2, [[1.0], [0.0, 1.0]], 1.0) == 1.0
    assert pass_at(2, [[1.0]], 1.0) is None
