"""From finished sessions to shards: rewards, complete groups, evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import FencedError, IntegrityError
from storage.ledger import TRAIN, Ledger, SampleKey, State

RUN = "demo"
EVAL = "eval/0"


def test_finished_samples_of_all_streams_are_handed_out_to_be_scored_once(ledger: Ledger, player: Any) -> None:
    player.admit(1, per_task=2)
    player.admit(1, per_task=1, stream=EVAL)
    for claim in player.claim(1) + player.claim(1, stream=EVAL):
        player.finish(claim)
    claims = ledger.claim_scores(RUN, "judge", 10, lease_s=60)
    assert [(c.key.stream, c.session, c.output) for c in claims] == [
        (EVAL, "s-eval/0-0-0-1", {"answer": 0}),
        (TRAIN, "s-train-0-0-1", {"answer": 0}),
    ]
    assert ledger.claim_scores(RUN, "judge", 10, lease_s=60) == []


def test_a_score_that_never_came_is_handed_out_again(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.finish(player.claim(1)[0])
    first = ledger.claim_scores(RUN, "hung", 10, lease_s=-1)
    assert ledger.claim_scores(RUN, "well", 10, lease_s=60) == first


def test_the_first_reward_stands(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    claim = player.claim(1)[0]
    player.score(claim, 0.5)
    ledger.score_sample(claim.key, 1, 0.5)
    with pytest.raises(FencedError, match="scored"):
        ledger.score_sample(claim.key, 1, 0.75)
    assert ledger.sample(claim.key).reward == 0.5


def test_a_missing_reward_is_a_failure_not_a_zero(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    claim = player.claim(1)[0]
    player.finish(claim)
    ledger.fail_sample(claim.key, 1, "reward_missing", "returned None", retry=False, max_attempts=1)
    row = ledger.sample(claim.key)
    assert (row.state, row.cause, row.reward) == (State.FAILED, "reward_missing", None)


def test_a_group_is_complete_when_each_sample_is_scored_or_has_ended(ledger: Ledger, player: Any) -> None:
    player.admit(2, per_task=3)
    claims = player.claim(5)
    player.score(claims[0], 1.0)
    player.score(claims[3], 1.0)
    player.score(claims[4], 1.0)
    ledger.fail_sample(claims[1].key, 1, "agent_error", "", retry=False, max_attempts=1)
    assert ledger.complete_groups(RUN) == []
    player.score(claims[2], 0.0)
    (group,) = ledger.complete_groups(RUN)
    assert group.ordinal == 0
    assert [row.state for row in group.rows] == [State.SCORED, State.FAILED, State.SCORED]
    assert [row.reward for row in group.scored] == [1.0, 0.0]


def test_a_shard_is_committed_once_and_takes_its_group_off_the_list(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    player.group([0.0, 1.0])
    tokens = {"s-train-0-0-1": 5, "s-train-0-1-1": 5}
    ledger.commit_group(RUN, TRAIN, 0, "shard-0", "sha-0", tokens)
    with pytest.raises(IntegrityError, match="has shard"):
        ledger.commit_group(RUN, TRAIN, 0, "shard-0", "other", tokens)
    assert ledger.complete_groups(RUN) == []
    assert ledger.ready_groups(RUN) == 1
    assert [row.tokens for row in ledger.samples(RUN, TRAIN, state=State.GROUPED)] == [5, 5]


def test_a_shard_must_hold_exactly_the_scored_sessions(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    for claim in player.claim(2):
        player.score(claim, 1.0)
    with pytest.raises(IntegrityError, match="holds sessions"):
        ledger.commit_group(RUN, TRAIN, 0, "k", "sha", {"s-train-0-0-1": 5, "stranger": 5})
    assert ledger.ready_groups(RUN) == 0


def test_an_incomplete_group_has_no_shard(ledger: Ledger, player: Any) -> None:
    player.admit(1, per_task=3)
    first, second = player.claim(2)
    player.score(first, 1.0)
    with pytest.raises(FencedError, match="1 samples not started"):
        ledger.commit_group(RUN, TRAIN, 0, "k", "sha", {"s-train-0-0-1": 5})
    assert second.key.sample == 1


def test_a_group_of_one_is_filtered_and_asks_for_another_task(ledger: Ledger, player: Any) -> None:
    player.admit(2)
    first, second = player.claim(2)
    player.score(first, 1.0)
    ledger.fail_sample(second.key, 1, "agent_error", "", retry=False, max_attempts=1)
    with pytest.raises(IntegrityError, match="at least two"):
        ledger.commit_group(RUN, TRAIN, 0, "k", "sha", {"s-train-0-0-1": 5})
    assert ledger.ended_groups(RUN) == 0
    assert ledger.filter_group(RUN, TRAIN, 0, "group_too_small") == 1
    assert ledger.filter_group(RUN, TRAIN, 0, "group_too_small") == 0
    assert ledger.books(RUN).filtered == {"group_too_small": 1}
    assert ledger.ended_groups(RUN) == 1


def test_a_group_dropped_for_zero_variance_asks_for_no_other_task(ledger: Ledger, player: Any) -> None:
    player.admit(2)
    player.group([1.0, 1.0])
    player.group([0.0, 1.0])
    player.batch(0, 2)
    assert ledger.ended_groups(RUN) == 0


def test_an_evaluation_waits_for_every_sample_and_may_be_read_twice(ledger: Ledger, player: Any) -> None:
    player.admit(2, per_task=2, stream=EVAL)
    claims = player.claim(3, stream=EVAL)
    for claim, reward in zip(claims, (1.0, 0.0, 0.5), strict=True):
        player.score(claim, reward)
    assert ledger.finish_evaluation(RUN, EVAL) is None
    (last,) = player.claim(1, stream=EVAL)
    assert ledger.finish_evaluation(RUN, EVAL) is None
    ledger.fail_sample(last.key, 1, "agent_error", "", retry=False, max_attempts=1)
    result = ledger.finish_evaluation(RUN, EVAL)
    assert result is not None
    assert (result.mean, result.n, result.failed) == (0.5, 3, 1)
    assert result.rewards == ((1.0, 0.0), (0.5,))
    assert ledger.finish_evaluation(RUN, EVAL) == result
    books = ledger.books(RUN, EVAL)
    assert (books.filtered, books.failed, books.balanced) == ({"evaluation": 3}, {"agent_error": 1}, True)


def test_an_evaluation_without_rewards_has_no_mean(ledger: Ledger, player: Any) -> None:
    player.admit(1, per_task=1, stream=EVAL)
    player.claim(1, stream=EVAL)
    ledger.fail_sample(SampleKey(RUN, EVAL, 0, 0), 1, "agent_error", "", retry=False, max_attempts=1)
    result = ledger.finish_evaluation(RUN, EVAL)
    assert result is not None
    assert (result.mean, result.n, result.failed) == (None, 0, 1)


def test_complete_groups_without_a_shard_are_counted_with_their_tokens(ledger: Ledger, player: Any) -> None:
    player.admit(3, per_task=2)
    claims = player.claim(5)
    assert ledger.unwritten(RUN) == (0, 0)
    for claim in claims[:3]:
        player.score(claim, 1.0)
    groups, tokens = ledger.unwritten(RUN)
    each = [ledger.sample(claim.key) for claim in claims[:2]]
    assert (groups, tokens) == (1, sum((row.prompt_tokens or 0) + (row.completion_tokens or 0) for row in each))
    assert tokens > 0
    ledger.filter_group(RUN, TRAIN, 0, "group_too_small")
    assert ledger.unwritten(RUN) == (0, 0)
