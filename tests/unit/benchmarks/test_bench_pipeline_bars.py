"""The pipeline bench says of each bar whether it is met, and nothing of parts that were not run."""

from __future__ import annotations

from typing import Any

from benchmarks.pipeline.bars import bars

LINE: dict[str, Any] = {
    "live": {"multiplexed": {"idle_fraction": 0.03}},
    "live_gain_vs_best_static": 0.01,
    "calibration_error": 0.1,
    "preempt_ms_p50": 100.0,
}
WORSE: dict[str, Any] = {
    "live": {"multiplexed": {"idle_fraction": 0.031}},
    "live_gain_vs_best_static": 0.0,
    "calibration_error": 0.101,
    "preempt_ms_p50": 100.1,
}


def verdicts(line: dict[str, Any]) -> list[str]:
    return [said.split()[0] for said in bars(line, [])]


def test_a_figure_on_its_bar_meets_it_and_one_beyond_is_missed() -> None:
    assert verdicts(LINE) == ["met"] * 4
    assert verdicts(WORSE) == ["MISSED"] * 4


def test_parts_that_were_not_run_have_no_bar() -> None:
    assert not bars(dict.fromkeys(LINE), [])
