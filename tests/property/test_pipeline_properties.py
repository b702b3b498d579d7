"""Pure scheduling decisions hold for any pipeline, at any step, with any numbers."""

from __future__ import annotations

import dataclasses
import functools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import scenario

from simulator.cluster import Costs
from simulator.lending import JustInTime
from simulator.run import simulate
from storage.ledger import WaitingGroup
from workflows.scheduling.admission import AdmissionFacts, in_flight_limit, may_start
from workflows.scheduling.pipeline import PipelinePolicy, policy
from workflows.scheduling.recall import FIRST_SHARE, LEAST_SHARE, PATIENCE, Recall, StepWaits, next_share, recall_at
from workflows.scheduling.selection import ordinal_window, preferring
from workflows.scheduling.switching import (
    GroupFlow,
    SwitchCost,
    gain_of_return,
    gain_of_taking,
    worth_switching,
)
from workflows.scheduling.triggers import RolloutFacts, interrupt, resume
from workflows.spec import PipelineSpec

SECONDS = st.floats(0, 1e4)
FACTS = st.builds(
    RolloutFacts,
    ready=st.integers(0, 20),
    wanted=st.integers(1, 20),
    waited_s=SECONDS,
    time_limit_s=SECONDS,
    node=st.just("n"),
    tagged=st.booleans(),
    up=st.booleans(),
    rolls_out=st.booleans(),
    lost=st.booleans(),
    serves=st.integers(0, 5),
    newest=st.integers(0, 5),
)
FLOWS = st.builds(
    GroupFlow,
    ready=st.integers(0, 40),
    wanted=st.integers(1, 20),
    supply=st.integers(0, 80),
    in_flight=st.integers(0, 40),
    rate=st.floats(0, 100, allow_subnormal=False),
)


@st.composite
def policies(draw: st.DrawFn) -> PipelinePolicy:
    name = draw(st.sampled_from(["colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed"]))
    staleness = draw(st.integers(0, 5)) if name in ("off_policy", "multiplexed") else None
    spec = {"name": name, "steps": draw(st.integers(1, 50)), "max_staleness": staleness}
    return policy(PipelineSpec.model_validate(spec), draw(st.integers(1, 16)))


@given(policies(), st.integers(0, 60))
def test_what_is_admitted_is_never_too_old_for_the_step_that_trains_it(rule: PipelinePolicy, step: int) -> None:
    admitted = rule.admit_until(step)
    assert admitted <= rule.admit_until(step + 1)
    if step < rule.steps:
        assert admitted >= (step + 1) * rule.groups_per_step, "a step can always be filled"
        last_step = (admitted - 1) // rule.groups_per_step  # trained in ordinal order
        assert rule.min_version(last_step) <= step
        assert last_step - step <= rule.staleness


@settings(max_examples=20)
@given(
    st.integers(0, 2), st.integers(0, 1000), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 2.0, 20.0]),
    st.sampled_from(["off_policy", "multiplexed"]),
)  # fmt: skip
def test_groups_that_are_accumulated_as_they_complete_are_never_older_than_the_bound(
    staleness: int, seed: int, share: float, sync_s: float, name: str
) -> None:
    given = scenario(
        name, steps=4, seed=seed, staleness=staleness, costs=Costs(sync_s=sync_s, stall_s=min(1.0, sync_s)),
        lending=functools.partial(JustInTime, share=share),
    )  # fmt: skip
    result = simulate(dataclasses.replace(given, policy=dataclasses.replace(given.policy, accumulates=True)))
    assert max(step.oldest for step in result.steps) <= staleness
    assert result.produced == result.trained + result.stale + result.pending
    assert [step.groups for step in result.steps] == [8] * 4


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.booleans()), max_size=40), st.integers(1, 512))
def test_train_nodes_are_called_for_at_least_one_group_and_for_no_more_than_a_batch(
    steps: list[tuple[float, float, float, bool]], wanted: int
) -> None:
    share = FIRST_SHARE
    for waited_s, train_s, rollout_s, starved in steps:
        before, share = share, next_share(share, waited_s, train_s, rollout_s, starved=starved)
        assert share >= before if waited_s > PATIENCE * train_s or not starved else share <= before
        assert 1 <= recall_at(share, wanted) <= wanted


STEP_FLOWS = st.builds(
    GroupFlow,
    ready=st.integers(0, 512),
    wanted=st.just(512),
    supply=st.integers(0, 1024),
    in_flight=st.integers(1, 512),
    rate=SECONDS,
)
WAITS = st.builds(
    StepWaits, called=st.booleans(), waited_s=SECONDS, train_s=SECONDS, rollout_s=SECONDS, starved=st.booleans()
)


@given(st.lists(st.tuples(WAITS, STEP_FLOWS), max_size=40))
def test_nodes_that_waited_when_they_stayed_return_until_they_are_called_too_late_to_wait(
    steps: list[tuple[StepWaits, GroupFlow]],
) -> None:
    recall, stayed_s = Recall(), 0.0
    for step, flow in steps:
        recall = recall.after(step, flow)
        if not step.called:
            stayed_s = step.waited_s
        elif step.waited_s <= PATIENCE * step.train_s:
            stayed_s = 0.0
        assert recall.idled_s == stayed_s
        assert LEAST_SHARE <= recall.share <= 1
        gain = gain_of_return(flow, train_s=step.train_s, idled_s=recall.idled_s)
        assert gain >= recall.idled_s or not flow.supply


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_a_batch_holds_all_groups_that_are_accumulated_already(
    waiting: set[int], accumulated: set[int], wanted: int
) -> None:
    groups = [WaitingGroup(n, 0, (0.0,), completed=-n, tokens=1) for n in waiting]
    wanted = min(wanted, len(groups))
    chosen = preferring(accumulated, ordinal_window)(groups, wanted)
    assert len(chosen) == len(set(chosen)) == wanted
    assert set(chosen) <= waiting
    held = accumulated & waiting
    assert held <= set(chosen) or set(chosen) <= held


@given(policies(), st.integers(0, 49), st.integers(0, 9))
def test_every_group_that_ended_is_replaced_by_one(rule: PipelinePolicy, step: int, ended: int) -> None:
    assert rule.admit_until(step, ended) == rule.admit_until(step) + ended


@given(FACTS)
def test_a_node_is_never_told_to_stop_and_to_begin_at_once(facts: RolloutFacts) -> None:
    stop, begin = interrupt(facts), resume(facts)
    assert begin is None or (stop is None or stop.what == "make an update")
    assert begin is None or (facts.tagged and facts.up)


@given(FACTS)
def test_a_complete_batch_or_a_passed_limit_always_leads_somewhere(facts: RolloutFacts) -> None:
    if facts.ready >= facts.wanted or (facts.ready and facts.waited_s > facts.time_limit_s):
        assert interrupt(facts) is not None


@given(SECONDS, SECONDS, SECONDS)
def test_more_gain_never_makes_a_change_less_worth(gain: float, more: float, cost: float) -> None:
    if worth_switching(gain, cost).what == "switch":
        assert worth_switching(gain + more, cost).what == "switch"


@given(FLOWS, SECONDS)
def test_gains_are_never_negative_and_never_undefined(flow: GroupFlow, cost: float) -> None:
    for gain in (gain_of_taking(flow), gain_of_return(flow)):
        assert gain >= -1e-9
        assert not math.isnan(gain)
        predicted = worth_switching(gain, cost).predicted_gain_s
        assert predicted is None or math.isfinite(predicted)


@given(st.lists(SECONDS, min_size=1, max_size=20))
def test_a_cost_lies_between_its_measurements(measured: list[float]) -> None:
    cost = SwitchCost()
    for seconds in measured:
        cost = cost.with_measured("load", seconds)
    assert cost.total_s is not None
    assert min(measured) - 1e-6 <= cost.total_s <= max(measured) + 1e-6


@given(
    st.integers(0, 100), st.integers(0, 50), st.integers(0, 60), st.integers(1, 8), st.integers(1, 64),
    st.none() | st.integers(0, 64), st.integers(0, 20),
)  # fmt: skip
def test_admission_respects_both_bounds(
    produced: int, running: int, until: int, group: int, target: int, capacity: int | None, queued: int
) -> None:
    facts = AdmissionFacts(produced, running, until, group, target, capacity)
    again, new = may_start(facts, queued)
    assert 0 <= again <= queued
    assert new >= 0
    assert not (again or new) or running + again + new <= in_flight_limit(target, capacity) <= target
    assert not new or produced + new <= until * group
    assert not new or again == queued, "another attempt goes first"
