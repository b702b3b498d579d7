"""The journal's file: its log, its space, other processes that write to it, files of an earlier release."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from storage.journal import JournalRecord, TokenCounts, open_journal
from storage.journals import sqlite
from storage.journals.sqlite import SqliteJournal

BLOB = np.zeros(1000, dtype=np.int32)

OLD = """
CREATE TABLE sessions (id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, closed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (
    seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL,
    ids BLOB, logprobs BLOB, n_ids INTEGER NOT NULL, n_sampled INTEGER NOT NULL
);
CREATE INDEX records_by_session ON records (session);
INSERT INTO sessions VALUES (1, 'old', 0), (2, 'done', 1);
INSERT INTO records VALUES (1, 1, 'prompt', '{"a":1}', X'0100000002000000', NULL, 2, 0);
INSERT INTO records VALUES (2, 1, 'chunk', '{}', X'03000000', X'0000803F', 1, 1);
"""


def open_file(folder: Path) -> SqliteJournal:
    journal = open_journal(f"sqlite:///{folder}/journal.db")
    assert isinstance(journal, SqliteJournal)
    return journal


def blob(session: str) -> JournalRecord:
    return JournalRecord(session, "prompt", {}, BLOB)


async def test_a_file_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "journal.db")
    old.executescript(OLD)
    old.close()
    for expected in (3, 4):
        journal = open_file(tmp_path)
        assert journal.open_sessions() == ["old"]
        assert journal.tokens() == TokenCounts(expected, 1)
        assert [record.kind for record in journal.read("old")][:2] == ["prompt", "chunk"]
        epoch = await journal.take("old", "proxy-1")
        if expected == 3:
            await journal.append(JournalRecord("old", "prompt", {}, np.array([4], dtype=np.int32)), epoch=epoch)
        journal.close()


async def test_the_log_is_emptied_beside_the_appends_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 200_000)
    journal = open_file(tmp_path)
    sizes = []
    for _ in range(8):
        checkpoint = journal._checkpoint
        while journal._checkpoint is checkpoint:
            await journal.append(blob("s"))
        assert journal._checkpoint is not None
        await journal._checkpoint
        sizes.append((tmp_path / "journal.db-wal").stat().st_size)
    assert sizes[-1] < 1.5 * sizes[1] < 1_000_000, "the log grows although it was emptied"
    rows = len(journal.read("s"))
    journal.close()
    journal = open_file(tmp_path)
    assert journal.tokens().ids == 1000 * rows
    journal.close()


@pytest.mark.timeout(60)
async def test_an_append_waits_for_another_process_without_holding_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 3600.0)
    journal = open_file(tmp_path)
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    append = asyncio.create_task(journal.append(blob("s")))
    await asyncio.sleep(0)
    assert not append.done()
    other.execute("COMMIT")
    other.close()
    await append
    assert len(journal.read("s")) == 1
    journal.close()


async def test_the_space_of_removed_records_is_used_again(tmp_path: Path) -> None:
    def pages() -> int:
        connection = sqlite3.connect(tmp_path / "journal.db")
        count = int(connection.execute("PRAGMA page_count").fetchone()[0])
        connection.close()
        return count

    journal = open_file(tmp_path)
    for n in range(200):
        await journal.append(blob(f"s{n}"))
    before = pages()
    removed = await journal.delete(*(f"s{n}" for n in range(200)))
    assert removed.bytes == 200 * (4000 + len("{}"))
    for n in range(200):
        await journal.append(blob(f"t{n}"))
    assert pages() < 1.05 * before
    journal.close()


async def test_two_processes_count_each_token_once(tmp_path: Path) -> None:
    first, second = open_file(tmp_path), open_file(tmp_path)
    for journal in (first, second, first):
        await journal.append(blob("s"))
        await journal.append(blob("t"))
    await second.delete("t")
    assert first.tokens() == second.tokens() == TokenCounts(6000, 0)
    first.close()
    await second.append(blob("s"))
    second.close()
    third = open_file(tmp_path)
    assert third.tokens() == TokenCounts(7000, 0)
    third.close()
