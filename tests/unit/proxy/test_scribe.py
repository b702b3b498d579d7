"""A session's records reach the journal in their order, a turn with the first that follows it or soon by itself."""

from __future__ import annotations

import asyncio

import pytest

from proxy import scribe as module
from proxy.scribe import Scribe
from storage.errors import StorageError
from storage.journal import JournalRecord


class Journal:
    """Keeps transactions by the kinds of their records; fails while ``broken``, waits for ``gate``."""

    def __init__(self) -> None:
        self.transactions: list[list[str]] = []
        self.broken = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, *records: JournalRecord) -> None:
        await self.gate.wait()
        if self.broken:
            raise StorageError("the disk is full")
        self.transactions.append([record.kind for record in records])


def record(kind: str) -> JournalRecord:
    return JournalRecord("s", kind, {})


@pytest.fixture
async def journal():
    return Journal()


async def test_what_is_noted_goes_in_one_transaction_with_what_follows(journal):
    scribe = Scribe(journal, "session s")
    scribe.note(record("turn"))
    await scribe.append(record("segment"), record("tokens"))
    await scribe.append(record("end"))
    await scribe.flush()
    assert journal.transactions == [["turn", "segment", "tokens"], ["end"]]


async def test_what_is_noted_is_written_soon_if_nothing_follows(journal, monkeypatch):
    monkeypatch.setattr(module, "_NOTED_S", 0.0)
    scribe = Scribe(journal, "session s")
    scribe.note(record("turn"))
    async with asyncio.timeout(10):
        while not journal.transactions:  # noqa: ASYNC110  # a timer's doing
            await asyncio.sleep(0.001)
    await scribe.append(record("tokens"))
    assert journal.transactions == [["turn"], ["tokens"]]


async def test_nothing_overtakes_a_turn(journal):
    scribe = Scribe(journal, "session s")
    scribe.note(record("turn"))
    journal.gate.clear()
    first = asyncio.create_task(scribe.append(record("tokens of one choice")))
    second = asyncio.create_task(scribe.append(record("tokens of another")))
    await asyncio.sleep(0)
    scribe.note(record("next turn"))
    journal.gate.set()
    await asyncio.gather(first, second)
    await scribe.append(record("its tokens"))
    order = [kind for transaction in journal.transactions for kind in transaction]
    assert order[:2] == ["turn", "tokens of one choice"]
    assert order.index("next turn") < order.index("its tokens")


async def test_behind_a_turn_that_is_not_in_the_journal_nothing_is_written(journal):
    scribe = Scribe(journal, "session s")
    scribe.note(record("turn"))
    journal.broken = True
    with pytest.raises(StorageError, match="disk is full"):
        await scribe.append(record("tokens"))
    journal.broken = False
    with pytest.raises(StorageError, match="session s has a turn that is not in the journal"):
        await scribe.append(record("fail"))
    with pytest.raises(StorageError):
        scribe.check()
    assert journal.transactions == []


async def test_a_journal_that_fails_behind_the_turn_is_written_again_later(journal):
    scribe = Scribe(journal, "session s")
    scribe.note(record("turn"))
    await scribe.flush()
    journal.broken = True
    with pytest.raises(StorageError, match="disk is full"):
        await scribe.append(record("tokens"))
    journal.broken = False
    await scribe.append(record("fail"))
    assert journal.transactions == [["turn"], ["fail"]]
