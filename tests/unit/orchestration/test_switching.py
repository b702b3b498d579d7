"""Whether a change of roles pays, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from workflows.scheduling.admission import AdmissionFacts, in_flight_limit, may_start, supply
from workflows.scheduling.switching import (
    KEPT,
    GroupFlow,
    SwitchCost,
    gain_of_return,
    gain_of_taking,
    seconds_to_next_batch,
    worth_switching,
)


def test_the_cost_of_a_change_is_the_sum_of_the_means_of_its_parts() -> None:
    cost = SwitchCost()
    assert cost.total_s is None
    for seconds in (1.0, 3.0):
        cost = cost.with_measured("release", seconds)
    cost = cost.with_measured("load", 0.5).with_measured("weights", 0.25).with_measured("first_token", 0.125)
    assert cost.total_s == pytest.approx(2 + 0.5 + 0.25 + 0.125)


def test_a_cost_follows_the_machine_within_a_few_measurements() -> None:
    cost = SwitchCost()
    for _ in range(10):
        cost = cost.with_measured("load", 60.0)
    for _ in range(KEPT):
        cost = cost.with_measured("load", 1.0)
    assert cost.total_s == 1.0


@pytest.mark.parametrize(
    ("gain", "cost", "what", "net"),
    [(4.0, 1.5, "switch", 2.5), (1.5, 1.5, "stay", 0.0), (0.5, 1.5, "stay", 1.0), (4.0, None, "switch", None)],
    ids=["pays", "within the margin", "does not pay", "cost unknown"],
)
def test_a_change_is_made_if_its_gain_exceeds_its_cost(
    gain: float, cost: float | None, what: str, net: float | None
) -> None:
    decision = worth_switching(gain, cost)
    assert (decision.what, decision.predicted_gain_s) == (what, net)


def test_nodes_that_would_be_left_without_work_always_change_over() -> None:
    assert worth_switching(math.inf, 100.0).what == "switch"


def test_a_node_that_returns_gains_the_time_until_the_next_batch_is_complete() -> None:
    flow = GroupFlow(ready=2, wanted=8, supply=10, in_flight=4, rate=0.5)
    assert seconds_to_next_batch(flow) == gain_of_return(flow) == 12.0
    assert gain_of_return(GroupFlow(ready=8, wanted=8, supply=4, in_flight=4, rate=0.5)) == 0.0
    assert gain_of_return(GroupFlow(ready=2, wanted=8, supply=0, in_flight=4, rate=0.5)) == 0.0, "nothing may start"


def test_waiting_for_a_second_batch_costs_the_idle_time_of_the_tail_only() -> None:
    plenty = GroupFlow(ready=4, wanted=4, supply=20, in_flight=4, rate=1.0)
    assert gain_of_taking(plenty) == 0.0, "there is work for all of the wait"
    # 4 groups awaited, 6 left, 4 at a time: 2 at full rate, 2 while 4 and then 3 are left: 4 ln(4 / 2) - 2 idle.
    tail = GroupFlow(ready=4, wanted=4, supply=6, in_flight=4, rate=1.0)
    assert gain_of_taking(tail) == pytest.approx(4 * math.log(2) - 2)


def test_a_second_batch_that_the_staleness_bound_forbids_is_not_waited_for() -> None:
    assert gain_of_taking(GroupFlow(ready=4, wanted=4, supply=4, in_flight=4, rate=1.0)) == math.inf
    assert gain_of_taking(GroupFlow(ready=4, wanted=4, supply=20, in_flight=4, rate=0.0)) == math.inf
    assert gain_of_taking(GroupFlow(ready=8, wanted=4, supply=20, in_flight=4, rate=1.0)) == math.inf, "it is complete"


def test_sessions_are_bounded_by_what_the_engines_decode() -> None:
    assert in_flight_limit(64, None) == 64
    assert in_flight_limit(64, 8) == 16
    assert in_flight_limit(64, 0) == 0, "no engine has an open route"


def test_another_attempt_goes_before_a_new_sample_and_may_pass_the_staleness_bound() -> None:
    facts = AdmissionFacts(produced=8, running=1, admit_until=4, samples_per_task=2, target_in_flight=4)
    assert may_start(facts, queued=1) == (1, 0)
    assert may_start(AdmissionFacts(6, 1, 4, 2, 4), queued=1) == (1, 2)
    assert may_start(AdmissionFacts(6, 4, 4, 2, 4), queued=1) == (0, 0)


@pytest.mark.parametrize(
    ("engines", "behind", "new"),
    [(2, 2, 0), (2, 1, 8), (3, 2, 0), (3, 1, 8), (0, 0, 8)],
)
def test_tasks_that_new_weights_admit_wait_until_most_engines_serve_them(engines: int, behind: int, new: int) -> None:
    facts = AdmissionFacts(8, 1, 8, 2, 64, fresh_from=4, engines=engines, behind=behind)
    assert may_start(facts) == (0, new), "one engine may be slow, or spared for an evaluation"


def test_tasks_admitted_earlier_do_not_wait_for_new_weights() -> None:
    facts = AdmissionFacts(6, 1, 8, 2, 64, fresh_from=4, engines=2, behind=2)
    assert may_start(facts) == (0, 2)


def test_supply_is_what_may_still_be_completed() -> None:
    assert supply(AdmissionFacts(8, 2, 6, 2, 4), complete=3) == 3
    assert supply(AdmissionFacts(8, 2, 2, 2, 4), complete=3) == 0
