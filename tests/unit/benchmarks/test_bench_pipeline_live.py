"""Figures of the live bench, on intervals worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.live_agent import MAX_TOKENS, make_tasks
from benchmarks.pipeline.live_figures import figures
from storage.errors import ConfigError
from storage.ledger import Interval, StepRecord

METRICS = {"tokens": 100.0, "staleness_mean": 0.5, "seconds": 2.0, "seconds_claim": 3.0}


def steps(*times: float) -> list[StepRecord]:
    return [StepRecord("r", 0, number, METRICS, time) for number, time in enumerate(times)]


def test_a_node_is_busy_while_it_generates_or_trains_and_idle_while_it_changes_over() -> None:
    intervals = [
        Interval("a", "generate", 0, 16),
        Interval("a", "generate", 12, 17),
        Interval("a", "train", 18, 20),
        Interval("b", "generate", 5, 40),
    ]
    found = figures(intervals, steps(2, 5, 10, 20, 30), ["a", "b"])
    assert found["idle_by_node"] == {"a": 0.1, "b": 0.0}
    assert found["idle_s"]["a"] == {"to training": 1.0, "to rollout": 0.0, "gang waits": 0.0, "no request": 0.0}
    assert (found["idle_fraction"], found["wall_s"], found["tokens_per_s"]) == (0.05, 20.0, 10.0)


def test_too_few_steps_have_no_steady_part() -> None:
    with pytest.raises(ConfigError, match="no steady part"):
        figures([], steps(1, 2, 3, 4), ["a"])


def test_every_pipeline_gets_the_same_long_tailed_tasks() -> None:
    shape = {"median_tokens": 100.0, "sigma": 0.9, "median_pause_s": 0.2}
    tasks = list(make_tasks(200, 0, **shape))
    assert tasks == list(make_tasks(200, 0, **shape))
    lengths = sorted(max(task.tokens) for task in tasks)
    assert lengths[-1] >= 3 * lengths[100]
    assert lengths[-1] <= MAX_TOKENS
