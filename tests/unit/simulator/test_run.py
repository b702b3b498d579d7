"""Whole runs: every sample ends once, the same seed gives the same run, and the scheduling code decides."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import AGENT, PIPELINES, SHORT, scenario

from simulator.cluster import Costs, Failures
from simulator.measure import Result
from simulator.run import simulate
from workflows.scheduling.decision import Decision
from workflows.scheduling.pipeline import PipelinePolicy
from workflows.scheduling.selection import BUILT_IN
from workflows.scheduling.triggers import RolloutFacts

FREE = Costs(rollout_to_train_s=0, train_to_rollout_s=0, sync_s=0)


def assert_balanced(result: Result, steps: int = 3) -> None:
    assert result.produced == result.trained + result.stale + result.pending
    assert [step.step for step in result.steps] == list(range(steps))


@pytest.mark.parametrize("workload", [SHORT, AGENT], ids=["single turn", "agent"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_sample_that_was_started_ends_once(name: str, workload: object) -> None:
    result = simulate(scenario(name, workload))  # type: ignore[arg-type]
    assert_balanced(result)
    assert result.trained == 3 * 8 * 4


@pytest.mark.parametrize("name", PIPELINES)
def test_every_second_of_every_node_is_booked_under_one_activity(name: str) -> None:
    result = simulate(scenario(name))
    assert sum(result.seconds.values()) == pytest.approx(4 * result.wall_s)
    assert 0 <= result.switch_fraction <= result.idle_fraction < 1


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again = simulate(scenario(seed=5)), simulate(scenario(seed=5))
    assert dataclasses.replace(first, real_s=0) == dataclasses.replace(again, real_s=0)
    assert simulate(scenario(seed=6)).wall_s != first.wall_s


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "micro_batch"])
def test_on_policy_pipelines_train_no_token_of_older_weights(name: str) -> None:
    assert simulate(scenario(name, AGENT)).staleness_mean == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("name", ["off_policy", "multiplexed"])
def test_no_step_trains_tokens_older_than_the_bound(name: str, staleness: int) -> None:
    result = simulate(scenario(name, steps=5, staleness=staleness))
    assert all(-1e-9 <= step.staleness <= staleness + 1e-9 for step in result.steps)


def test_weights_are_brought_while_engines_decode_and_only_then_stop_them() -> None:
    whole = simulate(scenario(steps=4, costs=Costs(sync_s=4)))
    beside = simulate(scenario(steps=4, costs=Costs(sync_s=4, stall_s=1)))
    assert 0 < beside.seconds["sync"] <= whole.seconds["sync"] / 3
    assert_balanced(beside, 4)


def test_time_is_measured_from_the_end_of_the_warm_up() -> None:
    whole, later = simulate(scenario(steps=4)), simulate(scenario(steps=4, warm_up=2))
    assert later.wall_s == pytest.approx(whole.wall_s - whole.steps[1].committed_at)
    assert [step.step for step in later.steps] == [2, 3]
    assert sum(later.seconds.values()) == pytest.approx(4 * later.wall_s)


def test_colocated_spends_what_generation_and_training_take_in_turn() -> None:
    result = simulate(scenario("colocated", costs=FREE))
    trained = sum(step.train_s for step in result.steps)
    assert result.seconds["train"] == pytest.approx(4 * trained)
    assert result.wall_s > trained
    assert result.idle_train == 0


def test_train_nodes_roll_out_between_updates_when_multiplexed_only() -> None:
    own, lent = simulate(scenario("off_policy", AGENT)), simulate(scenario("multiplexed", AGENT))
    assert own.seconds.get("train_idle", 0) > 0
    assert lent.seconds.get("train_idle", 0) == pytest.approx(0, abs=1e-6)
    assert lent.seconds["switch"] > 0


def test_a_users_policy_decides_when_an_update_is_made() -> None:
    class Half(PipelinePolicy):
        def interrupt(self, facts: RolloutFacts) -> Decision | None:
            return super().interrupt(dataclasses.replace(facts, wanted=facts.wanted // 2))

    plain = scenario("off_policy")
    half = dataclasses.replace(plain, policy=Half(**dataclasses.asdict(plain.policy)))
    results = simulate(plain), simulate(half)
    assert [step.groups for step in results[0].steps] == [8, 8, 8]
    assert all(4 <= step.groups < 8 for step in results[1].steps)


def test_a_policy_that_never_updates_is_told_and_not_waited_for() -> None:
    class Never(PipelinePolicy):
        def interrupt(self, facts: RolloutFacts) -> Decision | None:
            return None

    plain = scenario("off_policy")
    never = dataclasses.replace(plain, policy=Never(**dataclasses.asdict(plain.policy)))
    with pytest.raises(RuntimeError, match="cannot be complete"):
        simulate(never)


@pytest.mark.parametrize("name", PIPELINES)
def test_nodes_that_fail_cost_time_and_no_sample(name: str) -> None:
    calm = simulate(scenario(name, AGENT, steps=4))
    failing = scenario(name, AGENT, steps=4)
    failures = Failures(node_mtbf_h=0.2, recover_s=40, trainer_restart_s=20)
    result = simulate(dataclasses.replace(failing, cluster=failing.cluster.model_copy(update={"failures": failures})))
    assert result.failures > 0
    assert_balanced(result, steps=4)
    assert result.seconds["down"] > 0
    assert result.wall_s > calm.wall_s


def test_a_selection_of_the_users_decides_which_groups_make_a_batch() -> None:
    plain = scenario("off_policy", nodes=8, trainers=1, staleness=4, steps=9, stop_after=4)
    by_time = dataclasses.replace(plain, selection=BUILT_IN["completion"])
    oldest, quickest = simulate(plain), simulate(by_time)
    assert oldest.trained == quickest.trained
    assert oldest.tokens != quickest.tokens
