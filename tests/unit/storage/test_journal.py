"""The journal: what was acknowledged is there, in order, to the bit."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import ConfigError, StorageError
from storage.journal import CLOSED, Journal, JournalRecord, TokenCounts


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    yield journal
    journal.close()


def chunk(session: str, *ids: int) -> JournalRecord:
    logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32)
    return JournalRecord(session, "chunk", {"n": len(ids)}, np.array(ids, dtype=np.int32), logprobs)


def prompt(session: str, *ids: int) -> JournalRecord:
    return JournalRecord(session, "prompt", {}, np.array(ids, dtype=np.int32))


async def test_records_come_back_in_order_and_to_the_bit(journal: Journal) -> None:
    await journal.append(prompt("s", 1, 2, 3), chunk("s", 4))
    await journal.append(chunk("other", 9))
    awkward = np.array([-0.0, -1.17549435e-38, -3.1415927], dtype=np.float32)
    last = JournalRecord("s", "chunk", {"text": "ü \u2028"}, np.array([5, 6, 7], dtype=np.int32), awkward)
    await journal.append(last)
    records = journal.read("s")
    assert [(r.kind, r.data) for r in records] == [("prompt", {}), ("chunk", {"n": 1}), ("chunk", {"text": "ü \u2028"})]
    assert records[0].logprobs is None
    assert records[2].ids is not None
    assert records[2].logprobs is not None
    assert records[2].ids.tolist() == [5, 6, 7]
    assert records[2].logprobs.tobytes() == awkward.tobytes()
    assert journal.read("unknown") == []


async def test_appends_that_wait_together_keep_the_order_of_their_calls(journal: Journal) -> None:
    await asyncio.gather(*(journal.append(chunk("s", n)) for n in range(500)))
    ids = [int(r.ids[0]) for r in journal.read("s") if r.ids is not None]
    assert ids == list(range(500))


async def test_many_appends_share_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[int] = []
    commit = Journal._commit

    def counted(self: Journal, works: Sequence[Any]) -> None:
        commits.append(len(works))
        commit(self, works)

    monkeypatch.setattr(Journal, "_commit", counted)
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    await asyncio.gather(*(journal.append(chunk("s", n)) for n in range(500)))
    journal.close()
    assert sum(commits) == 500
    assert len(commits) < 100


async def test_another_connection_sees_a_record_once_its_append_returned(journal: Journal, tmp_path: Path) -> None:
    await journal.append(chunk("s", 1))
    other = sqlite3.connect(tmp_path / "journal.db")
    assert other.execute("SELECT COUNT(*) FROM records").fetchone() == (1,)
    other.close()


async def test_a_session_is_open_until_its_closed_record(journal: Journal) -> None:
    await journal.append(prompt("a", 1), prompt("b", 1), prompt("c", 1))
    await journal.append(JournalRecord("b", CLOSED, {}))
    assert journal.open_sessions() == ["a", "c"]


async def test_tokens_are_counted_also_after_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    journal = Journal(url)
    await journal.append(prompt("a", 1, 2, 3), chunk("a", 4, 5), chunk("b", 6))
    assert journal.tokens() == TokenCounts(6, 3)
    journal.close()
    journal = Journal(url, "power")
    assert journal.tokens() == TokenCounts(6, 3)
    assert journal.tokens_by_session() == {"a": TokenCounts(5, 2), "b": TokenCounts(1, 1)}
    await journal.delete("a", "never-there")
    assert journal.tokens() == TokenCounts(1, 1)
    assert (journal.read("a"), journal.open_sessions()) == ([], ["b"])
    await journal.append(chunk("a", 7))
    assert len(journal.read("a")) == 1
    journal.close()


async def test_a_record_that_cannot_be_written_fails_its_caller_and_leaves_nothing(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = Journal._insert
    await journal.append(chunk("s", 1))

    def full(self: Journal, rows: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Journal, "_insert", full)
    with pytest.raises(StorageError, match="disk is full"):
        await journal.append(chunk("new", 2))
    monkeypatch.setattr(Journal, "_insert", insert)
    assert journal.open_sessions() == ["s"]
    assert journal.tokens() == TokenCounts(1, 1)
    await journal.append(chunk("new", 3))
    assert [r.ids.tolist() for r in journal.read("new") if r.ids is not None] == [[3]]


async def test_a_cancelled_append_is_written_all_the_same(journal: Journal) -> None:
    task = asyncio.create_task(journal.append(chunk("s", 1)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await journal.append(chunk("s", 2))
    assert [r.ids.tolist() for r in journal.read("s") if r.ids is not None] == [[1], [2]]


async def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    journal.close()
    with pytest.raises(StorageError, match="closed"):
        await journal.append(chunk("s", 1))


@pytest.mark.parametrize(
    "record",
    [
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int64)),
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int32), np.zeros(2, dtype=np.float32)),
        JournalRecord("s", "chunk", {}, None, np.zeros(1, dtype=np.float32)),
        JournalRecord("s", "chunk", {}, np.array([1], dtype=np.int32), np.zeros(1)),  # type: ignore[arg-type]
    ],
)
async def test_ids_and_log_probs_that_do_not_fit_are_refused(journal: Journal, record: JournalRecord) -> None:
    with pytest.raises(StorageError, match="must be"):
        await journal.append(record)
    assert journal.open_sessions() == []


def test_a_url_that_names_no_file_is_refused() -> None:
    for url in ("sqlite://", "sqlite:///:memory:", "postgresql://host/db"):
        with pytest.raises(ConfigError, match="must be sqlite"):
            Journal(url)
