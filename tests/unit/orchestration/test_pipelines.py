"""The five pipelines: what may start, what is too old, who trains, what may overlap."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workflows.scheduling.pipeline import PipelinePolicy, policy, rollout_nodes, train_nodes
from workflows.spec import PipelineSpec, RunSpec


def made(name: str, staleness: int | None = None) -> PipelinePolicy:
    return policy(PipelineSpec.model_validate({"name": name, "steps": 10, "max_staleness": staleness}), 4)


def spec(name: str, *nodes: list[str]) -> RunSpec:
    data: dict[str, Any] = {"run": "r", "model": {"path": "/m"}, "data": {"path": "/d"}, "reward": {"target": "a:b"}}
    data["nodes"] = [{"id": f"n{i}", "tags": tags} for i, tags in enumerate(nodes)]
    return RunSpec.model_validate({**data, "pipeline": {"name": name}})


@pytest.mark.parametrize(
    ("name", "staleness", "trainers", "holds", "waits", "accumulates"),
    [
        ("colocated", 0, "preempt", True, True, False),
        ("disaggregated", 0, "own", True, True, False),
        ("micro_batch", 0, "own", False, True, True),
        ("off_policy", 1, "own", False, False, False),
        ("multiplexed", 1, "preempt", False, False, False),
    ],
)
def test_a_pipeline_is_the_values_of_its_policy(
    name: str, staleness: int, trainers: str, holds: bool, waits: bool, accumulates: bool
) -> None:
    rule = made(name)
    assert (rule.name, rule.staleness, rule.trainers) == (name, staleness, trainers)
    assert (rule.holds_rollout, rule.waits_for_sync, rule.accumulates) == (holds, waits, accumulates)


@pytest.mark.parametrize(
    ("name", "staleness", "step", "admitted", "oldest"),
    [
        ("multiplexed", 0, 0, 4, 0),
        ("multiplexed", 1, 0, 8, 0),
        ("multiplexed", 1, 3, 20, 2),
        ("off_policy", 2, 3, 24, 1),
        ("colocated", None, 3, 16, 3),
        ("micro_batch", None, 3, 16, 3),
    ],
)
def test_what_may_start_is_what_can_be_trained_before_it_is_too_old(
    name: str, staleness: int | None, step: int, admitted: int, oldest: int
) -> None:
    assert made(name, staleness).admit_until(step) == admitted
    assert made(name, staleness).min_version(step) == oldest


def test_nothing_starts_that_no_step_is_left_to_train_but_ended_groups_are_replaced() -> None:
    rule = made("multiplexed", 3)
    assert rule.admit_until(9) == 40
    assert rule.admit_until(9, ended=2) == 42


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "micro_batch"])
def test_a_staleness_bound_that_cannot_act_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="does nothing with the on-policy pipeline"):
        made(name, 2)


def test_whole_batches_cannot_be_accumulated() -> None:
    for name in ("colocated", "disaggregated"):
        with pytest.raises(ValidationError, match="accumulate does nothing"):
            PipelineSpec.model_validate({"name": name, "accumulate": True})


def test_an_algorithm_that_needs_the_whole_batch_refuses_to_accumulate() -> None:
    data = spec("multiplexed", ["rollout", "train"]).model_dump(mode="json")
    data["pipeline"]["accumulate"] = True
    assert RunSpec.model_validate(data).pipeline.accumulates
    with pytest.raises(ValidationError, match=r"pipeline\.accumulate accumulates gradients before the batch is whole"):
        RunSpec.model_validate({**data, "algorithm": {"name": "reinforce_pp"}})


def test_nodes_that_train_do_not_roll_out_where_the_pipeline_keeps_them_to_itself() -> None:
    run = spec("off_policy", ["rollout", "train"], ["rollout"], ["train"])
    assert train_nodes(run) == ("n0", "n2")
    assert rollout_nodes(run, "own") == ("n1",)
    assert rollout_nodes(run, "preempt") == ("n0", "n1")


def test_a_pipeline_that_would_leave_no_node_for_rollout_is_refused() -> None:
    with pytest.raises(ValidationError, match="keeps train nodes from rollout"):
        spec("disaggregated", ["rollout", "train"])
    assert spec("colocated", ["rollout", "train"]).pipeline.name == "colocated"
