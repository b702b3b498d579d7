"""Admission, staleness and gang layout."""

from __future__ import annotations

import pytest

from workflows.messages import GangView
from workflows.scheduling.gang import plan_gang
from workflows.scheduling.pipeline import policy, warning
from workflows.spec import PipelineSpec


@pytest.mark.parametrize(
    ("name", "staleness", "step", "admitted", "oldest"),
    [
        ("multiplexed", 0, 0, 4, 0),
        ("multiplexed", 1, 0, 8, 0),
        ("multiplexed", 1, 3, 20, 2),
        ("multiplexed", 2, 3, 24, 1),
        ("naive", 2, 3, 16, 3),
    ],
)
def test_what_may_start_is_what_can_be_trained_before_it_is_too_old(
    name: str, staleness: int, step: int, admitted: int, oldest: int
) -> None:
    rule = policy(PipelineSpec.model_validate({"name": name, "steps": 10, "max_staleness": staleness}), 4)
    assert rule.admit_until(step) == admitted
    assert rule.min_version(step) == oldest


def test_nothing_starts_that_no_step_is_left_to_train_but_ended_groups_are_replaced() -> None:
    rule = policy(PipelineSpec(steps=10, max_staleness=3), 4)
    assert rule.admit_until(9) == 40
    assert rule.admit_until(9, ended=2) == 42


def test_a_reward_that_is_the_same_for_a_whole_step_raises_an_alarm() -> None:
    assert "every sample of the last step had the same reward, 0.5" in warning({"reward_mean": 0.5, "reward_std": 0.0})
    assert warning({"reward_mean": 0.5, "reward_std": 0.01}) == ""
    assert warning({"replayed": 1.0}) == "", "the rewards of a replayed batch were judged when it was claimed"


def view(node: str, gang: str | None, ranks: int, version: int | None) -> GangView:
    return GangView(node=node, gang=gang, ranks=ranks, version=version, free_port=5000)


def test_a_whole_gang_at_the_newest_version_is_kept() -> None:
    plan = plan_gang("new", {"a": 2, "b": 1}, [view("a", "old", 2, 4), view("b", "old", 1, 4)], version=4)
    assert (plan.gang, plan.attached, plan.world_size) == ("old", True, 3)
    assert plan.first_rank == {"a": 0, "b": 2}


@pytest.mark.parametrize(
    "other",
    [view("b", None, 0, None), view("b", "other", 1, 4), view("b", "old", 0, 4), view("b", "old", 1, 3)],
    ids=["a node without ranks", "another gang", "a rank missing", "other weights"],
)
def test_a_gang_that_is_not_whole_starts_again_as_a_whole(other: GangView) -> None:
    plan = plan_gang("new", {"a": 2, "b": 1}, [view("a", "old", 2, 4), other], version=4)
    assert (plan.gang, plan.attached) == ("new", False)
