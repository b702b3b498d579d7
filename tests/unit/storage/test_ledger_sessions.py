"""Sessions, which outlive their proxy; metrics, intervals and human commands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from storage.errors import ConfigError, FencedError, NotFoundError, RewardError
from storage.ledger import Interval, Ledger, SessionRecord

RUN = "demo"
REMOTE = SessionRecord("s-remote", "hash", RUN, None, 1, {"temperature": 0.5}, parent="s-parent", created=5.0)


def test_a_session_is_found_by_the_hash_of_its_key(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    (claim, _) = player.claim(2)
    record = ledger.session_by_key_hash("hash-s-train-0-0-1")
    assert record is not None
    expected = SessionRecord("s-train-0-0-1", "hash-s-train-0-0-1", RUN, claim.key, 1, created=record.created)
    assert record == expected
    assert ledger.session_by_key_hash("unknown") is None
    with pytest.raises(NotFoundError, match="'unknown'"):
        ledger.session("unknown")


def test_a_session_without_a_sample_keeps_what_it_was_entered_with(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    ledger.put_session(REMOTE)
    assert ledger.session("s-remote") == REMOTE
    with pytest.raises(FencedError, match="another key"):
        ledger.put_session(replace(REMOTE, key_hash="other"))


def test_a_session_ends_once(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    ledger.close_session("s-remote")
    closed = ledger.session("s-remote")
    assert closed.closed
    assert closed.ended is not None
    ledger.close_session("s-remote")
    assert ledger.session("s-remote") == closed


def test_sessions_entered_together_are_entered_all_or_none(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    with pytest.raises(FencedError, match="another key"):
        ledger.put_session(SessionRecord("s-new", "new", RUN, None, 0), replace(REMOTE, key_hash="other"))
    with pytest.raises(NotFoundError):
        ledger.session("s-new")


def test_a_session_is_taken_over_by_who_knows_its_owner(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    ledger.own_session("s-remote", "proxy-1", None)
    ledger.own_session("s-remote", "proxy-1", None)
    with pytest.raises(FencedError, match="'proxy-1'"):
        ledger.own_session("s-remote", "proxy-2", None)
    ledger.own_session("s-remote", "proxy-2", "proxy-1")
    with pytest.raises(FencedError, match="'proxy-2'"):
        ledger.own_session("s-remote", "proxy-3", "proxy-1")
    assert ledger.session("s-remote").proxy == "proxy-2"
    with pytest.raises(NotFoundError):
        ledger.own_session("unknown", "proxy-1", None)


def test_the_first_reward_of_a_session_outside_the_queue_stands(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    ledger.reward_session("s-remote", 0.5)
    ledger.reward_session("s-remote", 0.5)
    for other in ((0.25, None), (None, "reward_error")):
        with pytest.raises(FencedError, match="already"):
            ledger.reward_session("s-remote", *other)
    assert (ledger.session("s-remote").reward, ledger.session("s-remote").reward_cause) == (0.5, None)


def test_a_missing_reward_has_a_cause_and_is_no_zero(ledger: Ledger) -> None:
    ledger.put_session(REMOTE)
    for wrong in (None, float("nan"), float("inf")):
        with pytest.raises(RewardError):
            ledger.reward_session("s-remote", wrong)
    ledger.reward_session("s-remote", None, "reward_error")
    ledger.reward_session("s-remote", None, "reward_error")
    with pytest.raises(FencedError, match="already"):
        ledger.reward_session("s-remote", 0.0)
    assert (ledger.session("s-remote").reward, ledger.session("s-remote").reward_cause) == (None, "reward_error")


def test_a_session_of_a_sample_takes_no_reward_of_its_own(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.claim(1)
    with pytest.raises(FencedError, match="score the sample"):
        ledger.reward_session("s-train-0-0-1", 1.0)
    with pytest.raises(NotFoundError):
        ledger.reward_session("unknown", 1.0)


def test_turns_of_a_run_are_those_last_noted_of_its_sessions(ledger: Ledger) -> None:
    ledger.put_session(
        REMOTE, SessionRecord("s-2", "hash-2", RUN, None, 0), SessionRecord("s-3", "h3", "other", None, 0)
    )
    assert ledger.turns_of(RUN) == (0, 0)
    ledger.count_turns("s-remote", 2, 1)
    ledger.count_turns("s-remote", 3, 1)
    ledger.count_turns("s-2", 4, 0)
    ledger.count_turns("s-3", 9, 9)
    assert ledger.turns_of(RUN) == (7, 1)


def test_text_that_no_database_holds_is_kept_readable(ledger: Ledger, player: Any) -> None:
    player.admit(1, per_task=1)
    (claim,) = player.claim(1)
    ledger.fail_sample(claim.key, 1, "agent_error", "bell\0\ud800 ü", retry=False, max_attempts=1)
    assert ledger.sample(claim.key).detail == "bell\N{SYMBOL FOR NULL}? ü"
    ledger.record_step(RUN, 0, 0, {"loss": float("nan"), "text": "\0\ud800"})
    ((metrics),) = [step.metrics for step in ledger.steps(RUN)]
    assert math.isnan(metrics["loss"])
    assert metrics["text"] == "\0\ud800"


def test_metrics_of_a_step_are_replaced_not_doubled(ledger: Ledger) -> None:
    ledger.record_step(RUN, 0, 0, {"loss": 1.0})
    ledger.record_step(RUN, 0, 1, {"loss": 0.5})
    ledger.record_step(RUN, 0, 0, {"loss": 2.0})
    assert [(s.step, s.metrics) for s in ledger.steps(RUN)] == [(0, {"loss": 2.0}), (1, {"loss": 0.5})]


def test_an_interval_that_goes_on_moves_its_end(ledger: Ledger) -> None:
    ledger.record_interval(RUN, "a", "generate", 1.0, 2.0)
    ledger.record_interval(RUN, "a", "generate", 1.0, 3.0)
    ledger.record_interval(RUN, "b", "train", 0.5, 1.0)
    assert ledger.intervals(RUN) == [Interval("b", "train", 0.5, 1.0), Interval("a", "generate", 1.0, 3.0)]
    with pytest.raises(ConfigError, match="'sleep'"):
        ledger.record_interval(RUN, "a", "sleep", 1.0, 2.0)


def test_a_nodes_profile_is_that_of_its_last_measurement_with_a_model(ledger: Ledger) -> None:
    ledger.put_profile("a", "/m1", {"train_priority": 1.0})
    ledger.put_profile("a", "/m2", {"train_priority": 3.0})
    ledger.put_profile("a", "/m1", {"train_priority": 2.0})
    ledger.put_profile("b", "/m1", {})
    found = [(row["node"], row["model"], row["profile"]) for row in ledger.profiles("a")]
    assert found == [("a", "/m1", {"train_priority": 2.0}), ("a", "/m2", {"train_priority": 3.0})]
    assert len(ledger.profiles()) == 3


def test_human_commands_are_kept_in_order(ledger: Ledger) -> None:
    ledger.audit("ann", "preempt", "maintenance", {"node": "a"})
    ledger.audit("bob", "resume", "done")
    assert [(e.actor, e.what, e.why, e.data) for e in ledger.audits()] == [
        ("ann", "preempt", "maintenance", {"node": "a"}),
        ("bob", "resume", "done", {}),
    ]


def test_sessions_of_a_run_come_page_by_page_and_open_ones_are_counted(ledger: Ledger) -> None:
    ledger.put_session(*(SessionRecord(f"s-{n}", f"hash-{n}", RUN, None, 0) for n in range(4)))
    ledger.put_session(SessionRecord("s-else", "hash-else", "else", None, 0))
    ledger.close_session("s-1")
    assert [record.session for record in ledger.sessions_of(RUN, after="s-0", limit=2)] == ["s-1", "s-2"]
    assert [record.session for record in ledger.sessions_of(RUN, open_only=True)] == ["s-0", "s-2", "s-3"]
    assert [record.session for record in ledger.sessions_of(None, open_only=True, limit=3)] == ["s-0", "s-2", "s-3"]
    assert (ledger.open_sessions(RUN), ledger.open_sessions("else"), ledger.open_sessions("none")) == (3, 1, 0)


def test_children_are_found_by_their_parent(ledger: Ledger) -> None:
    ledger.put_session(REMOTE, SessionRecord("s-other", "hash-other", RUN, None, 0, label="a label"))
    assert [record.session for record in ledger.children_of("s-parent")] == ["s-remote"]
    assert ledger.children_of("s-remote") == []
    assert ledger.session("s-other").label == "a label"
