"""The pipeline bench says of each bar whether it is met, and nothing of parts that were not run."""

from __future__ import annotations

from typing import Any

from benchmarks.pipeline.bars import bars
from benchmarks.pipeline.simulated import Cell
from simulator.advice import Choice
from simulator.measure import Activity, Result

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


def verdicts(line: dict[str, Any], *cells: Cell) -> list[str]:
    return [said.split()[0] for said in bars(line, cells)]


def cell(name: str, nodes: int, *, idle: float = 0.0, **wall_s: float) -> Cell:
    """``wall_s`` by pipeline, 100 s where none is given; ``idle``: of the multiplexed one, the others never are."""

    def choice(pipeline: str, seconds: float) -> Choice:
        waits = idle if pipeline == "multiplexed" else 0.0
        spent: dict[Activity, float] = {"decode": 1 - waits, "rollout_idle": waits}
        result = Result(
            pipeline, nodes, seconds, spent, [], produced=0, trained=0, stale=0, pending=0, tokens_stale=0.0, switches=0
        )
        return Choice(1, result)

    walls = dict.fromkeys(("colocated", "off_policy", "off_policy+parts", "multiplexed"), 100.0) | wall_s
    return Cell(name, nodes, {name: choice(name, seconds) for name, seconds in walls.items()}, seconds=1.0)


def test_a_figure_on_its_bar_meets_it_and_one_beyond_is_missed() -> None:
    assert verdicts(LINE) == ["met"] * 4
    assert verdicts(WORSE) == ["MISSED"] * 4


def test_parts_that_were_not_run_have_no_bar() -> None:
    assert not bars(dict.fromkeys(LINE), [])


def test_simulated_idle_time_counts_from_32_nodes_on() -> None:
    none = dict.fromkeys(LINE)
    assert verdicts(none, cell("mixed-20k", 4, idle=0.5)) == []
    assert verdicts(none, cell("mixed-20k", 32, idle=0.009)) == ["met"]
    assert verdicts(none, cell("mixed-20k", 32, idle=0.011)) == ["MISSED"]
    assert verdicts(none, cell("mixed-20k", 10_000, idle=0.011)) == ["MISSED"]


def test_the_gain_is_asked_against_the_strongest_split_where_tails_are_long_and_splits_are_searched() -> None:
    none = dict.fromkeys(LINE)
    fast = cell("drift-20k", 32, multiplexed=90.0)
    assert verdicts(none, fast) == ["met", "met"]
    against_parts = cell("drift-20k", 32, multiplexed=90.0, **{"off_policy+parts": 95.0})
    assert verdicts(none, against_parts) == ["met", "MISSED"]
    assert "+5.3%" in bars(none, [against_parts])[1]
    assert "+10.0% against that of off-policy filling" in bars(none, [against_parts])[1]
    assert verdicts(none, cell("drift-20k", 1024, multiplexed=99.0)) == ["met"]
    assert verdicts(none, cell("math-8k-instruct", 64, multiplexed=99.0)) == ["met"]


def test_the_speed_up_over_synchronous_colocated_is_asked_at_64_nodes() -> None:
    none = dict.fromkeys(LINE)
    assert verdicts(none, cell("swe-64k", 64, colocated=155.0)) == ["met", "met"]
    assert verdicts(none, cell("swe-64k", 64, colocated=154.0)) == ["met", "MISSED"]
    assert verdicts(none, cell("swe-64k", 32, colocated=154.0)) == ["met"]
