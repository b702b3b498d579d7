"""The learning proof's plan, its statistics by hand, and what it says of given curves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.learning import report
from benchmarks.learning.__main__ import Results
from benchmarks.learning.curves import Mean, Row, compare, group_rewards, mean_of, over_seeds, staleness
from benchmarks.learning.plan import NODES, TASKS, plan, run_file
from storage.errors import ConfigError
from storage.ledger import SampleKey, SampleRow, State, StepRecord
from workflows.scheduling.pipeline import policy_of


def row(setting: str, end: float, *, seed: int = 0, spread: float = 0.1) -> Row:
    steps = [(0.2, 0.4)] * 4 + [(end - spread, end + spread)] * 6
    (cell,) = [cell for cell in plan() if (cell.task, cell.setting, cell.seed) == ("tiny", setting, seed)]
    return Row("tiny", setting, seed, cell.digest(), tuple(steps), (0.0,) * 10, 1.0)


def sample(ordinal: int, number: int, reward: float | None, step: int | None) -> SampleRow:
    key = SampleKey("r", "train", ordinal, number)
    empty = {field.name: None for field in dataclasses.fields(SampleRow)}
    return SampleRow(**{**empty, "key": key, "attempt": 1, "state": State.TRAINED, "reward": reward, "step": step})  # type: ignore[arg-type]


def test_the_proof_is_four_settings_on_three_seeds_of_the_tiny_model_and_two_on_smollm2() -> None:
    cells = plan()
    assert [cell.task for cell in cells] == ["tiny"] * 12 + ["smollm2"] * 2
    assert len({cell.run for cell in cells}) == 14


def test_a_part_of_the_proof_is_made_of_the_same_runs() -> None:
    part = plan(["tiny"], ["corrected"], seeds=1)
    assert part == [cell for cell in plan() if cell.run == "tiny-corrected-0"]


def test_a_part_that_is_not_in_the_proof_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such run"):
        plan(["smollm2"], ["ppo"])


@pytest.mark.parametrize("cell", plan(), ids=lambda cell: cell.run)
def test_a_run_trains_what_its_setting_says_on_nodes_of_the_cluster(cell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    spec = run_file(cell, tmp_path)
    off = cell.setting in ("corrected", "uncorrected")
    assert policy_of(spec).staleness == (1 if off else 0)
    assert spec.algorithm.has_critic == (cell.setting == "ppo")
    assert (spec.algorithm.correction_used == "none") == (cell.setting == "uncorrected")
    assert set(spec.nodes) <= set(NODES)
    assert spec.seed == cell.seed


def test_settings_of_a_task_differ_in_pipeline_and_algorithm_only(tmp_path: Path) -> None:
    specs = [run_file(cell, tmp_path).model_dump() for cell in plan(["tiny"], seeds=1)]
    names = {name for spec in specs for name in spec if spec[name] != specs[0][name]}
    assert names == {"run", "nodes", "pipeline", "algorithm"}


def test_each_trained_group_counts_once_in_the_step_that_trained_it() -> None:
    samples = [
        *(sample(0, i, r, step=0) for i, r in enumerate((0.0, 1.0))),
        *(sample(1, i, r, step=1) for i, r in enumerate((1.0, 1.0))),
        *(sample(2, i, r, step=0) for i, r in enumerate((0.5, None))),
        sample(3, 0, 1.0, step=None),
    ]
    assert group_rewards(samples, 2) == ((0.5, 0.5), (1.0,))


def test_a_step_that_trained_nothing_has_no_reward() -> None:
    with pytest.raises(ConfigError, match="step 1"):
        group_rewards([sample(0, 0, 1.0, step=0)], 2)


def test_the_staleness_of_a_step_made_again_is_that_of_the_last_time() -> None:
    records = [
        StepRecord("r", 0, 0, {"staleness_mean": 0.0}, 1.0),
        StepRecord("r", 1, 1, {"staleness_mean": 1.0}, 3.0),
        StepRecord("r", 0, 1, {"staleness_mean": 0.5}, 2.0),
    ]
    assert staleness(records) == (0.0, 1.0)


def test_an_end_is_the_mean_of_the_last_steps_groups_with_its_standard_error() -> None:
    found = row("on_policy", 0.8).end(6)
    assert found.value == pytest.approx(0.8)
    assert found.error == pytest.approx(math.sqrt(12 * 0.01 / 11 / 12))
    assert row("on_policy", 0.8).first(2).value == pytest.approx(0.3)


def test_one_group_has_no_standard_error() -> None:
    with pytest.raises(ConfigError, match="no standard error"):
        mean_of([1.0])


def test_a_settings_error_is_the_spread_of_its_seeds_unless_the_groups_alone_give_more() -> None:
    wide = over_seeds([Mean(0.7, 0.01), Mean(0.8, 0.01), Mean(0.9, 0.01)])
    assert (wide.value, wide.error) == (pytest.approx(0.8), pytest.approx(0.1 / math.sqrt(3)))
    narrow = over_seeds([Mean(0.8, 0.03), Mean(0.8, 0.03), Mean(0.8, 0.03)])
    assert narrow.error == pytest.approx(0.03 / math.sqrt(3))
    assert over_seeds([Mean(0.8, 0.03)]) == Mean(0.8, 0.03)


def test_two_standard_errors_of_the_difference_are_noise() -> None:
    near = compare(Mean(0.9, 0.03), Mean(0.81, 0.04))
    assert near.noise == pytest.approx(0.1)
    assert near.within_noise
    assert not compare(Mean(0.9, 0.03), Mean(0.79, 0.04)).within_noise


def test_the_verdict_names_both_ends_the_difference_and_the_noise() -> None:
    lines = report.verdicts([row("on_policy", 0.8), row("corrected", 0.82), row("uncorrected", 0.5)])
    assert lines[0].startswith("tiny: corrected ends at 0.820 ± 0.030, on policy at 0.800 ± 0.030: +0.020, within")
    assert "NOT within" in lines[1]
    assert lines[1].endswith("(for contrast)")


def test_table_and_json_line_hold_every_run() -> None:
    rows = [row("on_policy", 0.8), row("on_policy", 0.9, seed=1)]
    assert len(report.table(rows).splitlines()) == 3
    assert report.headline(rows)["rows"][1] == {
        "task": "tiny", "setting": "on_policy", "seed": 1, "reward_first": 0.3, "reward_last": 0.9,
    }  # fmt: skip


def test_the_picture_shows_settings_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "learning.png"
    report.draw([row("on_policy", 0.8), row("on_policy", 0.9, seed=1), row("ppo", 0.7)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_kept_result_is_read_back_as_it_was_and_the_newest_counts(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    (cell,) = plan(["tiny"], ["on_policy"], seeds=1)
    assert results.of([cell]) == {}
    for kept in (row("on_policy", 0.8), row("on_policy", 0.9), row("ppo", 0.5)):
        results.add(kept)
    assert results.of([cell]) == {cell: row("on_policy", 0.9)}


def test_a_result_of_another_plan_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    (cell,) = plan(["tiny"], ["on_policy"], seeds=1)
    results.add(dataclasses.replace(row("on_policy", 0.8), digest="of a run with other steps"))
    assert results.of([cell]) == {}


def test_windows_of_first_and_last_steps_do_not_overlap(tmp_path: Path) -> None:
    for task in TASKS.values():
        assert task.first + task.last <= task.sections["pipeline"]["steps"]
