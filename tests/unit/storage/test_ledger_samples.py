"""Samples from start to finish: what may start, who may end it."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import ConfigError, FencedError, NotFoundError, RewardError
from storage.ledger import TRAIN, Ledger, SampleKey, State

RUN = "demo"
FIRST = SampleKey(RUN, TRAIN, 0, 0)


def test_a_run_is_entered_once_and_never_with_another_run_file(ledger: Ledger) -> None:
    ledger.create_run(RUN, {"run": RUN}, "digest")
    with pytest.raises(ConfigError, match="another run file"):
        ledger.create_run(RUN, {"run": RUN, "seed": 1}, "other")
    assert [info.run for info in ledger.runs()] == [RUN]
    assert ledger.run_info(RUN).spec == {"run": RUN}
    ledger.create_run(
        RUN, {"run": RUN, "trainer": "smaller rows"}, "digest"
    )  # what may change has no part in the digest
    assert ledger.run_info(RUN).spec["trainer"] == "smaller rows"


def test_an_unknown_run_is_named_not_made(ledger: Ledger) -> None:
    with pytest.raises(NotFoundError, match="'typo'"):
        ledger.run_info("typo")
    with pytest.raises(NotFoundError, match="'typo'"):
        ledger.set_admission("typo", TRAIN, admit_until=1, target_in_flight=1, samples_per_task=1)


def test_a_stopped_run_has_a_time_and_loses_it_when_it_goes_on(ledger: Ledger) -> None:
    ledger.set_run_state(RUN, "finished", stopped=True)
    assert ledger.run_info(RUN).stopped is not None
    ledger.set_run_state(RUN, "running")
    assert (ledger.run_info(RUN).state, ledger.run_info(RUN).stopped) == ("running", None)


def test_samples_start_in_order_and_finish_a_group_before_the_next(player: Any) -> None:
    player.admit(3, per_task=2)
    started = [(c.key.ordinal, c.key.sample) for c in player.claim(3) + player.claim(3)]
    assert started == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_nothing_starts_past_the_admitted_ordinals(player: Any) -> None:
    player.admit(1, per_task=2)
    assert len(player.claim(100)) == 2
    assert player.claim(100) == []
    player.admit(2, per_task=2)
    assert len(player.claim(100)) == 2


def test_never_more_samples_run_than_the_target(player: Any) -> None:
    player.admit(100, in_flight=5)
    first = player.claim(100)
    assert len(first) == 5
    assert player.claim(100) == []
    player.finish(first[0])
    assert len(player.claim(100)) == 1


def test_a_paused_stream_starts_nothing(ledger: Ledger, player: Any) -> None:
    player.admit(4)
    ledger.set_admission(RUN, TRAIN, admit_until=4, target_in_flight=9, samples_per_task=2, paused=True)
    assert player.claim() == []


def test_the_group_size_of_a_stream_cannot_change(player: Any) -> None:
    player.admit(4, per_task=2)
    with pytest.raises(ConfigError, match="samples per task"):
        player.admit(4, per_task=3)


def test_a_finished_attempt_may_be_reported_twice(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    claim = player.claim(1)[0]
    player.finish(claim)
    player.finish(claim)
    row = ledger.sample(FIRST)
    assert (row.state, row.completion_tokens, row.turns) == (State.FINISHED, 5, 2)
    assert row.output == {"answer": 0}


def test_a_stale_attempt_can_neither_finish_nor_score_nor_fail(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    stale = player.claim(1)[0]
    assert ledger.fail_sample(FIRST, 1, "infra", "engine died", retry=True, max_attempts=3) == 2
    fresh = player.claim(1)[0]
    assert (fresh.key, fresh.attempt) == (FIRST, 2)
    with pytest.raises(FencedError, match="attempt 1"):
        player.finish(stale)
    with pytest.raises(FencedError, match="attempt 1"):
        ledger.score_sample(FIRST, 1, 1.0)
    with pytest.raises(FencedError, match="attempt 1"):
        ledger.fail_sample(FIRST, 1, "agent_error", "late", retry=False, max_attempts=3)
    assert ledger.sample(FIRST).state is State.RUNNING


def test_a_failure_may_be_reported_twice_and_costs_one_attempt(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.claim(1)
    for _ in range(2):
        assert ledger.fail_sample(FIRST, 1, "infra", "engine died", retry=True, max_attempts=2) == 2
    player.claim(1)
    for _ in range(2):
        assert ledger.fail_sample(FIRST, 2, "infra", "engine died", retry=True, max_attempts=2) is None
    row = ledger.sample(FIRST)
    assert (row.state, row.cause, row.attempt) == (State.FAILED, "infra", 2)


def test_retries_start_before_new_samples(ledger: Ledger, player: Any) -> None:
    player.admit(10, in_flight=2)
    claims = player.claim()
    ledger.fail_sample(claims[1].key, 1, "infra", "", retry=True, max_attempts=3)
    ledger.fail_sample(claims[0].key, 1, "infra", "", retry=True, max_attempts=3)
    assert [(c.key, c.attempt) for c in player.claim()] == [(claims[0].key, 2), (claims[1].key, 2)]


def test_a_terminal_sample_stays_as_it_is(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    claim = player.claim(1)[0]
    ledger.fail_sample(FIRST, 1, "agent_error", "ValueError", retry=False, max_attempts=3)
    with pytest.raises(FencedError, match="failed"):
        player.finish(claim)
    with pytest.raises(FencedError, match="failed"):
        ledger.fail_sample(FIRST, 1, "infra", "", retry=True, max_attempts=3)
    assert ledger.sample(FIRST).detail == "ValueError"


def test_the_samples_of_a_lost_worker_are_queued_again_until_their_attempts_are_used_up(
    ledger: Ledger, player: Any
) -> None:
    player.admit(10, in_flight=2)
    player.claim(1, worker="lost")
    player.claim(1, worker="well")
    released = ledger.release_worker(RUN, TRAIN, "lost", max_attempts=2)
    assert [(r.key.sample, r.attempt, r.session, r.next_attempt) for r in released] == [(0, 1, "s-train-0-0-1", 2)]
    assert ledger.release_worker(RUN, TRAIN, "lost", max_attempts=2) == []
    player.claim(1, worker="lost")
    assert [r.next_attempt for r in ledger.release_worker(RUN, TRAIN, "lost", max_attempts=2)] == [None]
    assert ledger.books(RUN).failed == {"infra": 1}
    assert [row.worker for row in ledger.samples(RUN, TRAIN, state=State.RUNNING)] == ["well"]


def test_a_session_key_dies_with_its_attempt(ledger: Ledger, player: Any) -> None:
    player.admit(2)
    finished, failed, released, running = player.claim(4)
    player.finish(finished)
    ledger.fail_sample(failed.key, 1, "agent_error", "", retry=False, max_attempts=1)
    assert [record.key for record in ledger.sessions_of(RUN, open_only=True)] == [released.key, running.key]
    ledger.release_worker(RUN, TRAIN, "w", max_attempts=3)
    assert ledger.sessions_of(RUN, open_only=True) == []


def test_an_infinite_reward_is_refused(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.finish(player.claim(1)[0])
    for reward in (float("nan"), float("inf")):
        with pytest.raises(RewardError, match="reward_invalid"):
            ledger.score_sample(FIRST, 1, reward)
    assert ledger.sample(FIRST).state is State.FINISHED


def test_books_name_every_place(ledger: Ledger, player: Any) -> None:
    player.admit(3, per_task=2)
    claims = player.claim(5)
    player.score(claims[0], 1.0)
    player.finish(claims[1])
    ledger.fail_sample(claims[2].key, 1, "agent_timeout", "", retry=False, max_attempts=1)
    ledger.fail_sample(claims[3].key, 1, "infra", "", retry=True, max_attempts=2)
    books = ledger.books(RUN)
    assert books.balanced
    assert (books.produced, books.trained, books.filtered) == (5, 0, {})
    assert books.failed == {"agent_timeout": 1}
    assert books.pending == {"queued": 1, "running": 1, "finished": 1, "scored": 1}


def test_an_ended_run_has_no_pending_samples_and_starts_no_more(ledger: Ledger, player: Any) -> None:
    player.admit(4, per_task=2)
    player.group([0.0, 1.0])
    late = player.claim(3)
    ledger.fail_sample(late[0].key, 1, "infra", "", retry=True, max_attempts=2)
    assert ledger.end_run(RUN) == 5
    books = ledger.books(RUN)
    assert (books.filtered, books.pending, books.balanced) == ({"run_ended": 5}, {}, True)
    assert player.claim() == []
    assert ledger.ready_groups(RUN) == 0
    with pytest.raises(FencedError, match="run_ended"):
        player.finish(late[1])
