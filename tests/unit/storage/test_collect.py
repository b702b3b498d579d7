"""Which journals go when, and what stays of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.collect import Collected, RetentionPolicy, collect
from storage.errors import StorageError
from storage.journal import CLOSED, Journal, JournalRecord, TokenCounts, open_journal
from storage.ledger import TRAIN, Ledger, SampleClaim, SessionRecord

RUN = "demo"
EVAL = "eval/0"
AT_ONCE = RetentionPolicy(keep_s=-1.0)
WITH_SHARD = RetentionPolicy(by="shard", keep_s=-1.0)


@pytest.fixture
def journal(database_url: str, tmp_path: Path) -> Iterator[Journal]:
    """In the ledger's database where that is a server, as its users have it."""
    journal = open_journal(database_url if database_url.startswith("postgresql") else f"sqlite:///{tmp_path}/j.db")
    yield journal
    journal.close()


async def write(journal: Journal, *sessions: str) -> None:
    for session in sessions:
        prompt = JournalRecord(session, "turn", {}, np.arange(3, dtype=np.int32))
        tokens = JournalRecord(session, "tokens", {}, np.arange(2, dtype=np.int32), np.zeros(2, dtype=np.float32))
        await journal.append(prompt, tokens, JournalRecord(session, CLOSED, {}))


def of(claims: list[SampleClaim]) -> list[str]:
    return [f"s-{c.key.stream}-{c.key.ordinal}-{c.key.sample}-{c.attempt}" for c in claims]


def left(journal: Journal, sessions: list[str]) -> list[str]:
    return [session for session in sessions if journal.read(session)]


async def test_records_of_a_group_go_when_a_checkpoint_contains_it(
    ledger: Ledger, journal: Journal, player: Any
) -> None:
    player.admit(2)
    for _ in range(2):
        player.group([0.0, 1.0])
    names = [f"s-train-{ordinal}-{sample}-1" for ordinal in (0, 1) for sample in (0, 1)]
    await write(journal, *names)
    assert await collect(ledger, journal, RUN, AT_ONCE) == Collected()
    player.batch(0, 1)
    assert await collect(ledger, journal, RUN, AT_ONCE) == Collected()
    player.checkpoint(0)
    collected = await collect(ledger, journal, RUN, AT_ONCE)
    assert (collected.sessions, collected.rows) == (2, 2 * 2), "what was appended at once, and the end"
    assert left(journal, names) == names[2:]
    assert await collect(ledger, journal, RUN, AT_ONCE) == Collected()


async def test_records_go_with_the_shard_where_the_policy_says_so(
    ledger: Ledger, journal: Journal, player: Any
) -> None:
    player.admit(2)
    player.group([0.0, 1.0])
    (waiting, _) = claims = player.claim(2)
    player.score(waiting, 1.0)
    await write(journal, "s-train-0-0-1", "s-train-0-1-1", *of(claims))
    assert (await collect(ledger, journal, RUN, WITH_SHARD)).sessions == 2
    assert left(journal, of(claims)) == of(claims)


async def test_what_was_removed_still_counts(ledger: Ledger, journal: Journal, player: Any) -> None:
    player.admit(1)
    player.group([0.0, 1.0])
    await write(journal, "s-train-0-0-1")
    before = journal.tokens()
    await collect(ledger, journal, RUN, WITH_SHARD)
    assert journal.tokens() == before == TokenCounts(5, 2)
    assert journal.tokens_by_session() == {"s-train-0-0-1": TokenCounts(5, 2)}
    assert ledger.session("s-train-0-0-1").collected == 2
    assert ledger.session("s-train-0-1-1").collected == 0, "it never wrote, and is done with all the same"


async def test_all_attempts_stay_until_their_sample_has_an_end(ledger: Ledger, journal: Journal, player: Any) -> None:
    player.admit(1, per_task=1)
    (first,) = player.claim(1)
    ledger.fail_sample(first.key, 1, "infra", "", retry=True, max_attempts=2)
    (second,) = player.claim(1)
    names = of([first, second])
    await write(journal, *names)
    assert await collect(ledger, journal, RUN, AT_ONCE) == Collected()
    ledger.fail_sample(first.key, 2, "agent_error", "", retry=True, max_attempts=2)
    assert (await collect(ledger, journal, RUN, AT_ONCE)).sessions == 2
    assert left(journal, names) == []


async def test_filtered_and_evaluated_samples_need_no_journal(ledger: Ledger, journal: Journal, player: Any) -> None:
    player.admit(1)
    player.group([1.0, 1.0])
    player.batch(0, 1)
    player.admit(1, per_task=1, stream=EVAL)
    (claim,) = player.claim(1, stream=EVAL)
    player.score(claim, 1.0)
    names = ["s-train-0-0-1", "s-train-0-1-1", *of([claim])]
    await write(journal, *names)
    assert (await collect(ledger, journal, RUN, AT_ONCE)).sessions == 2
    assert left(journal, names) == of([claim])
    ledger.finish_evaluation(RUN, EVAL)
    assert (await collect(ledger, journal, RUN, AT_ONCE)).sessions == 1


async def test_records_are_kept_for_a_time_after_the_session_ended(
    ledger: Ledger, journal: Journal, player: Any
) -> None:
    player.admit(1)
    player.group([0.0, 1.0])
    await write(journal, "s-train-0-0-1")
    assert await collect(ledger, journal, RUN, RetentionPolicy(by="shard", keep_s=600.0)) == Collected()


async def test_an_open_session_and_another_run_are_left_alone(ledger: Ledger, journal: Journal) -> None:
    ledger.create_run("other", {}, "digest")
    ledger.put_session(SessionRecord("open", "1", RUN, None, 0), SessionRecord("theirs", "2", "other", None, 0))
    ledger.close_session("theirs")
    await write(journal, "open", "theirs")
    assert await collect(ledger, journal, RUN, RetentionPolicy(keep_s=-1.0, outside_s=-1.0)) == Collected()


async def test_sessions_that_no_shard_holds_stay_unless_they_have_a_time_of_their_own(
    ledger: Ledger, journal: Journal
) -> None:
    ledger.put_session(
        SessionRecord("remote", "1", RUN, None, 0), SessionRecord("child", "2", RUN, None, 0, parent="remote")
    )
    for session in ("remote", "child"):
        ledger.close_session(session)
    await write(journal, "remote", "child")
    assert await collect(ledger, journal, RUN, AT_ONCE) == Collected()
    assert (await collect(ledger, journal, RUN, RetentionPolicy(outside_s=-1.0))).sessions == 2


async def test_a_collection_that_was_cut_off_is_finished_by_the_next(
    ledger: Ledger, journal: Journal, player: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    player.admit(1)
    player.group([0.0, 1.0])
    await write(journal, "s-train-0-0-1", "s-train-0-1-1")

    def dies(self: Ledger, sampled: object) -> None:
        raise StorageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "mark_collected", dies)
        with pytest.raises(StorageError, match="killed"):
            await collect(ledger, journal, RUN, WITH_SHARD)
    assert left(journal, ["s-train-0-0-1", "s-train-0-1-1"]) == []
    assert await collect(ledger, journal, RUN, WITH_SHARD) == Collected(2, 0, 0)
    assert [ledger.session(f"s-train-0-{sample}-1").collected for sample in (0, 1)] == [2, 2]


async def test_more_sessions_than_one_round_takes_all_go(ledger: Ledger, journal: Journal, player: Any) -> None:
    player.admit(300, per_task=1)
    for claim in player.claim(250):
        ledger.fail_sample(claim.key, 1, "agent_error", "", retry=False, max_attempts=1)
    await write(journal, "s-train-7-0-1")
    collected = await collect(ledger, journal, RUN, AT_ONCE)
    assert (collected.sessions, collected.rows) == (250, 2)
    assert collected.bytes >= 4 * 7
    assert ledger.superseded(RUN, by="trained", ended_before=1e12, outside_before=1e12, limit=9) == []
    assert TRAIN in ledger.streams(RUN)
