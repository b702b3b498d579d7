"""Why attempts had no result, as a user can ask the ledger."""

from __future__ import annotations

from typing import Any

from storage.ledger import TRAIN, Ledger, SampleKey

RUN = "demo"


def test_a_run_without_failures_has_none(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.group([0.0, 1.0])
    assert ledger.failures(RUN) == []


def test_each_cause_comes_with_its_count_and_what_happened_to_the_last_attempt(ledger: Ledger, player: Any) -> None:
    player.admit(2)
    first, second, _, fourth = player.claim()
    player.finish(fourth)
    ledger.fail_sample(first.key, 1, "agent_error", "KeyError: 'a'", retry=False, max_attempts=3)
    ledger.fail_sample(second.key, 1, "agent_error", "KeyError: 'b'", retry=False, max_attempts=3)
    ledger.fail_sample(fourth.key, 1, "reward_missing", "it returned None", retry=False, max_attempts=3)
    often, once = ledger.failures(RUN)
    assert (often.cause, often.attempts, often.key, often.attempt) == ("agent_error", 2, second.key, 1)
    assert (often.detail, often.session) == ("KeyError: 'b'", "s-train-0-1-1")
    assert (once.cause, once.attempts, once.key) == ("reward_missing", 1, fourth.key)


def test_attempts_that_were_tried_again_count_and_other_runs_and_streams_do_not(ledger: Ledger, player: Any) -> None:
    ledger.create_run("other", {}, "digest")
    ledger.set_admission("other", TRAIN, admit_until=1, target_in_flight=1, samples_per_task=2)
    (foreign,) = ledger.claim_samples("other", TRAIN, "w", 1)
    ledger.fail_sample(foreign.key, 1, "agent_error", "not ours", retry=False, max_attempts=1)
    player.admit(1)
    player.admit(1, stream="eval/0")
    (held_out,) = player.claim(1, stream="eval/0")
    ledger.fail_sample(held_out.key, 1, "infra", "the engine died", retry=True, max_attempts=3)
    assert [(failure.cause, failure.attempts) for failure in ledger.failures(RUN)] == [("infra", 1)]
    assert ledger.failures(RUN)[0].key == SampleKey(RUN, "eval/0", 0, 0)
    assert ledger.failures(RUN, TRAIN) == []
    assert ledger.books(RUN).failed == {}
