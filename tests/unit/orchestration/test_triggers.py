"""Every trigger of the rollout manager, and which one speaks where several apply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workflows.scheduling.triggers import RELEASE, ROLL_OUT, SYNC, UPDATE, RolloutFacts, interrupt, resume

CALM = RolloutFacts(node="b", ready=3, wanted=4, waited_s=5, time_limit_s=10, serves=2, newest=2)


def test_nothing_interrupts_a_node_that_rolls_out_for_a_batch_that_is_not_complete() -> None:
    assert interrupt(CALM) is None


@pytest.mark.parametrize(
    ("facts", "what", "why"),
    [
        (replace(CALM, ready=4), UPDATE, "4 groups are complete, 4 make a step"),
        (replace(CALM, waited_s=11), UPDATE, "the time limit of 10 s has passed with 3 of 4 groups"),
        (replace(CALM, newest=3), SYNC, "version 3 is published"),
        (replace(CALM, tagged=False), RELEASE, "the tag rollout was taken from node b"),
        (replace(CALM, ready=4, newest=3), SYNC, "version 3 is published"),
        (replace(CALM, tagged=False, newest=3), RELEASE, "the tag rollout was taken from node b"),
    ],
    ids=["enough groups", "time limit", "weight sync", "tag change", "sync before update", "tag before sync"],
)
def test_rollout_is_interrupted(facts: RolloutFacts, what: str, why: str) -> None:
    decision = interrupt(facts)
    assert decision is not None
    assert (decision.what, decision.why) == (what, why)


def test_a_time_limit_without_a_single_group_interrupts_nothing() -> None:
    assert interrupt(replace(CALM, ready=0, waited_s=11)) is None


def test_a_node_that_does_not_roll_out_has_nothing_to_interrupt() -> None:
    assert interrupt(replace(CALM, rolls_out=False, tagged=False, newest=3)) is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (RolloutFacts(node="b", rolls_out=False), "node b has the tag rollout and is free"),
        (RolloutFacts(node="b", rolls_out=False, lost=True), "node b is back"),
        (RolloutFacts(node="b"), None),
        (RolloutFacts(node="b", rolls_out=False, tagged=False), None),
        (RolloutFacts(node="b", rolls_out=False, lost=True, up=False), None),
    ],
    ids=["tag change", "node back", "rolls out already", "without the tag", "still away"],
)
def test_rollout_resumes(facts: RolloutFacts, why: str | None) -> None:
    decision = resume(facts)
    assert (decision and decision.why) == why
    assert decision is None or decision.what == ROLL_OUT
