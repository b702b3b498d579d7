"""The journal: what was acknowledged is there, in order, to the bit, and its session has one owner."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from storage.errors import ConfigError, FencedError, StorageError
from storage.journal import CLOSED, Journal, JournalRecord, Removed, TokenCounts, open_journal
from storage.journals.base import Work


@pytest.fixture(params=["process", "power"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def journal(database_url: str, durability: str) -> Iterator[Journal]:
    journal = open_journal(database_url, durability)  # type: ignore[arg-type]
    yield journal
    journal.close()


def chunk(session: str, *ids: int) -> JournalRecord:
    logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32)
    return JournalRecord(session, "chunk", {"n": len(ids)}, np.array(ids, dtype=np.int32), logprobs)


def prompt(session: str, *ids: int) -> JournalRecord:
    return JournalRecord(session, "prompt", {}, np.array(ids, dtype=np.int32))


def closed(session: str) -> JournalRecord:
    return JournalRecord(session, CLOSED, {})


def ids_of(journal: Journal, session: str) -> list[list[int]]:
    return [record.ids.tolist() for record in journal.read(session) if record.ids is not None]


async def test_records_come_back_in_order_and_to_the_bit(journal: Journal) -> None:
    await journal.append(prompt("s", 1, 2, 3), chunk("s", 4))
    await journal.append(chunk("other", 9))
    awkward = np.array([-0.0, -1.17549435e-38, -3.1415927], dtype=np.float32)
    last = JournalRecord("s", "chunk", {"text": "ü \u2028 \0"}, np.array([5, 6, 7], dtype=np.int32), awkward)
    await journal.append(last)
    records = journal.read("s")
    kinds = [("prompt", {}), ("chunk", {"n": 1}), ("chunk", {"text": "ü \u2028 \0"})]
    assert [(r.kind, r.data) for r in records] == kinds
    assert records[0].logprobs is None
    assert records[2].ids is not None
    assert records[2].logprobs is not None
    assert records[2].ids.tolist() == [5, 6, 7]
    assert records[2].logprobs.tobytes() == awkward.tobytes()
    assert journal.read("unknown") == []


async def test_empty_and_large_records_come_back_too(journal: Journal) -> None:
    many = np.arange(200_000, dtype=np.int32)
    await journal.append(JournalRecord("s", "prompt", {}, many), chunk("s"), JournalRecord("s", "note", {"a": None}))
    large, empty, note = journal.read("s")
    assert large.ids is not None
    assert np.array_equal(large.ids, many)
    assert empty.ids is not None
    assert empty.logprobs is not None
    assert (len(empty.ids), len(empty.logprobs)) == (0, 0)
    assert (note.ids, note.logprobs, note.data) == (None, None, {"a": None})


async def test_appends_that_wait_together_keep_the_order_of_their_calls(journal: Journal) -> None:
    await asyncio.gather(*(journal.append(chunk("s", n), chunk("t", n)) for n in range(500)))
    for session in ("s", "t"):
        assert ids_of(journal, session) == [[n] for n in range(500)]


async def test_many_appends_share_few_commits(journal: Journal) -> None:
    commits: list[int] = []
    writer = journal._writer
    for name in ("_commit", "_quick"):
        commit = getattr(writer, name)

        def counted(works: Sequence[Work], commit=commit):  # type: ignore[no-untyped-def]
            commits.append(len(works))
            return commit(works)

        if commit is not None:
            setattr(writer, name, counted)
    await asyncio.gather(*(journal.append(chunk("s", n)) for n in range(500)))
    assert sum(commits) == 500
    assert len(commits) < 100


async def test_another_process_sees_a_record_once_its_append_returned(journal: Journal, database_url: str) -> None:
    await journal.append(chunk("s", 1))
    other = open_journal(database_url)
    assert ids_of(other, "s") == [[1]]
    other.close()


async def test_a_session_is_open_until_its_closed_record(journal: Journal) -> None:
    await journal.append(prompt("a", 1), prompt("b", 1), prompt("c", 1))
    await journal.append(closed("b"))
    await journal.append(prompt("d", 1), closed("d"))
    assert journal.open_sessions() == ["a", "c"]


async def test_tokens_are_counted_also_after_a_restart(database_url: str) -> None:
    journal = open_journal(database_url)
    await journal.append(prompt("a", 1, 2, 3), chunk("a", 4, 5), chunk("b", 6))
    assert journal.tokens() == TokenCounts(6, 3)
    journal.close()
    for _ in range(2):
        journal = open_journal(database_url, "power")
        assert journal.tokens() == TokenCounts(6, 3)
        assert journal.tokens_by_session() == {"a": TokenCounts(5, 2), "b": TokenCounts(1, 1)}
        journal.close()


async def test_removed_records_are_gone_and_their_tokens_still_count(database_url: str) -> None:
    journal = open_journal(database_url)
    await journal.append(prompt("a", 1, 2, 3), chunk("a", 4, 5), chunk("b", 6))
    removed = await journal.delete("a", "never-there")
    assert (removed.rows, removed.tokens) == (1, {"a": TokenCounts(5, 2)})
    assert removed.bytes >= 4 * 5 + 4 * 2
    for _ in range(2):
        assert (journal.read("a"), ids_of(journal, "b")) == ([], [[6]])
        assert journal.tokens() == TokenCounts(6, 3)
        assert journal.tokens_by_session() == {"a": TokenCounts(5, 2), "b": TokenCounts(1, 1)}
        assert await journal.delete("a") == Removed(0, 0, {"a": TokenCounts(5, 2)})
        journal.close()
        journal = open_journal(database_url)
    await journal.append(chunk("b", 7), chunk("a", 8))
    assert journal.tokens() == TokenCounts(8, 5)
    assert journal.tokens_by_session() == {"a": TokenCounts(6, 3), "b": TokenCounts(2, 2)}
    journal.close()


async def test_a_record_that_cannot_be_written_fails_its_caller_and_leaves_nothing(journal: Journal) -> None:
    await journal.append(chunk("s", 1))
    unfit = JournalRecord("new", None, {"n": 1}, np.array([2], dtype=np.int32))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="not committed"):
        await journal.append(chunk("new", 2), chunk("another", 2), unfit)
    assert journal.open_sessions() == ["s"]
    assert journal.tokens() == TokenCounts(1, 1)
    await journal.append(chunk("new", 3))
    assert ids_of(journal, "new") == [[3]]


async def test_a_cancelled_append_is_written_all_the_same(journal: Journal) -> None:
    await journal.append(chunk("s", 0))
    task = asyncio.create_task(journal.append(chunk("s", 1)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await journal.append(chunk("s", 2))
    assert ids_of(journal, "s") == [[0], [1], [2]]


async def test_a_closed_journal_takes_nothing(database_url: str) -> None:
    journal = open_journal(database_url)
    journal.close()
    with pytest.raises(StorageError, match="closed"):
        await journal.append(chunk("s", 1))


@pytest.mark.parametrize(
    "record",
    [
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int64)),  # type: ignore[arg-type]
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int32), np.zeros(2, dtype=np.float32)),
        JournalRecord("s", "chunk", {}, None, np.zeros(1, dtype=np.float32)),
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int32), np.zeros(1)),  # type: ignore[arg-type]
    ],
)
async def test_ids_and_log_probs_that_do_not_fit_are_refused(journal: Journal, record: JournalRecord) -> None:
    with pytest.raises(StorageError, match="must be"):
        await journal.append(record)
    assert journal.open_sessions() == []


async def test_an_owner_writes_until_another_takes_the_session(journal: Journal) -> None:
    first = await journal.take("s", "proxy-1")
    await journal.append(prompt("s", 1), epoch=first)
    await journal.append(chunk("s", 2), epoch=first)
    second = await journal.take("s", "proxy-2")
    assert second > first
    assert await asyncio.to_thread(journal.owner, "s") == ("proxy-2", second)
    for records in ([chunk("s", 3)], [chunk("s", 3), chunk("s", 4)], [closed("s")]):
        with pytest.raises(FencedError, match="s was taken by another proxy"):
            await journal.append(*records, epoch=first)
    await journal.append(chunk("s", 5), epoch=second)
    assert ids_of(journal, "s") == [[1], [2], [5]]
    assert journal.open_sessions() == ["s"]
    assert journal.tokens() == TokenCounts(3, 2)


async def test_an_owner_of_removed_records_cannot_write_any_more(journal: Journal) -> None:
    epoch = await journal.take("s", "proxy-1")
    await journal.append(chunk("s", 1), closed("s"), epoch=epoch)
    await journal.delete("s")
    assert await asyncio.to_thread(journal.owner, "s") is None
    with pytest.raises(FencedError):
        await journal.append(chunk("s", 2), epoch=epoch)
    assert journal.read("s") == []


async def test_a_take_over_is_seen_by_the_process_that_lost_the_session(journal: Journal, database_url: str) -> None:
    epoch = await journal.take("s", "proxy-1")
    await journal.append(prompt("s", 1), epoch=epoch)
    await journal.append(chunk("s", 2), epoch=epoch)
    other = open_journal(database_url)
    taken = await other.take("s", "proxy-2")
    read = ids_of(other, "s")
    with pytest.raises(FencedError):
        await journal.append(chunk("s", 3), epoch=epoch)
    await other.append(chunk("s", 4), epoch=taken)
    assert read == [[1], [2]]
    assert ids_of(other, "s") == [[1], [2], [4]]
    other.close()


async def test_appends_of_others_go_on_beside_a_refused_one(journal: Journal) -> None:
    lost, kept = await journal.take("lost", "proxy-1"), await journal.take("kept", "proxy-1")
    await journal.take("lost", "proxy-2")
    outcomes = await asyncio.gather(
        journal.append(chunk("free", 1)),
        journal.append(chunk("kept", 1), epoch=kept),
        journal.append(chunk("lost", 1), epoch=lost),
        journal.append(chunk("kept", 2), chunk("kept", 3), epoch=kept),
        journal.append(chunk("lost", 2), chunk("lost", 3), epoch=lost),
        journal.append(chunk("free", 2), closed("free")),
        return_exceptions=True,
    )
    ok, late = type(None), FencedError
    assert [type(outcome) for outcome in outcomes] == [ok, ok, late, ok, late, ok]
    assert (ids_of(journal, "lost"), ids_of(journal, "kept")) == ([], [[1], [2], [3]])
    assert ids_of(journal, "free") == [[1], [2]]
    assert journal.open_sessions() == ["lost", "kept"]


async def test_taking_orders_with_the_appends_around_it(journal: Journal) -> None:
    first = await journal.take("s", "proxy-1")
    outcomes = await asyncio.gather(
        journal.append(chunk("s", 1), epoch=first),
        journal.take("s", "proxy-2"),
        journal.append(chunk("s", 2), epoch=first),
        return_exceptions=True,
    )
    assert outcomes[:2] == [None, first + 1]
    assert isinstance(outcomes[2], FencedError)
    assert ids_of(journal, "s") == [[1]]


async def test_an_epoch_is_of_one_session_and_nobody_owns_what_was_not_taken(journal: Journal) -> None:
    epoch = await journal.take("a", "proxy-1")
    with pytest.raises(StorageError, match="of one session"):
        await journal.append(chunk("a", 1), chunk("b", 1), epoch=epoch)
    await journal.append(chunk("b", 1))
    assert await asyncio.to_thread(journal.owner, "b") is None
    with pytest.raises(FencedError):
        await journal.append(chunk("b", 2), epoch=1)
    with pytest.raises(FencedError):
        await journal.append(chunk("unknown", 1), epoch=1)
    assert journal.read("unknown") == []


async def test_no_append_slips_in_beside_a_take_over(database_url: str) -> None:
    """Two processes, as two journals in two threads: what the new owner reads is all that the old one was told of."""
    first = open_journal(database_url)
    epoch = await first.take("s", "proxy-1")
    read: dict[str, Any] = {}
    started = threading.Event()

    async def take_over() -> None:
        second = open_journal(database_url)
        started.wait(30)
        await second.take("s", "proxy-2")
        read["rows"] = len(second.read("s"))
        second.close()

    taking = asyncio.create_task(asyncio.to_thread(asyncio.run, take_over()))
    acknowledged = 0
    with contextlib.suppress(FencedError):
        while True:
            await first.append(chunk("s", 1), epoch=epoch)
            acknowledged += 1
            started.set()
            await asyncio.sleep(0)
    await taking
    assert read["rows"] == acknowledged
    assert len(first.read("s")) == acknowledged
    first.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "postgresql://host", "no url"])
def test_a_url_that_cannot_be_a_journal_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="journal"):
        open_journal(url)
