"""The journal against a real server: lost connections and answers, in-flight commits, several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psycopg
import pytest
from postgres import PostgresServer

from storage.databases import Durability
from storage.errors import FencedError, StorageError
from storage.journal import JournalRecord, TokenCounts, open_journal
from storage.journals import postgres as implementation
from storage.journals.base import Append, Row
from storage.journals.postgres import PostgresJournal


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.database()
    yield url
    postgres.drop(url)


def connect(url: str, durability: Durability = "process") -> PostgresJournal:
    journal = open_journal(url, durability)
    assert isinstance(journal, PostgresJournal)
    return journal


def chunk(session: str, *ids: int) -> JournalRecord:
    return JournalRecord(session, "chunk", {}, np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32))


def ids_of(journal: PostgresJournal, session: str) -> list[int]:
    return [int(number) for record in journal.read(session) if record.ids is not None for number in record.ids]


def lost_answer(operation: Callable[..., Any], cut: Callable[[], object]) -> Callable[..., Any]:
    """``operation`` as it looks when its first answer is lost on the way."""
    calls = 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        answer = operation(*arguments)
        calls += 1
        if calls == 1:
            cut()
            raise psycopg.OperationalError("the connection is lost")
        return answer

    return call


async def test_appends_go_on_after_the_connections_were_cut(postgres: PostgresServer, url: str) -> None:
    journal = connect(url)
    for n in range(3):
        await journal.append(chunk("s", n))
        assert ids_of(journal, "s") == list(range(n + 1))
        assert postgres.cut_connections(url) == 2
    journal.close()


@pytest.mark.parametrize("cut", [True, False])
async def test_an_append_whose_answer_was_lost_is_written_once(
    postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    journal = connect(url)
    epoch = await journal.take("s", "proxy-1")
    await journal.append(chunk("s", 1), epoch=epoch)
    monkeypatch.setattr(journal, "_write", lost_answer(journal._write, lambda: cut and postgres.cut_connections(url)))
    await journal.append(chunk("s", 2), epoch=epoch)
    await journal.append(chunk("s", 3), epoch=epoch)
    assert ids_of(journal, "s") == [1, 2, 3]
    assert journal.tokens() == TokenCounts(3, 3)
    journal.close()


async def test_a_first_append_whose_answer_was_lost_is_written_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = connect(url)
    monkeypatch.setattr(journal, "_write", lost_answer(journal._write, lambda: None))
    await journal.append(chunk("s", 1))
    assert ids_of(journal, "s") == [1]
    assert journal.tokens() == TokenCounts(1, 1)
    journal.close()


async def test_a_take_over_waits_for_the_append_that_is_being_committed(
    postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = connect(url), connect(url)
    epoch = await old.take("s", "proxy-1")
    written, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    write = old._write

    def slowly(connection: psycopg.Connection[Any], *arguments: Any) -> Any:
        with connection.transaction():
            answer = write(connection, *arguments)
            loop.call_soon_threadsafe(written.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return answer

    monkeypatch.setattr(old, "_write", slowly)
    appending = asyncio.create_task(old.append(chunk("s", 1), epoch=epoch))
    await written.wait()
    taking = asyncio.create_task(new.take("s", "proxy-2"))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(30):
        while await asyncio.to_thread(postgres.execute, url, waiting) != [(1,)]:
            assert not taking.done()
    assert new.read("s") == []
    go_on.set()
    await appending
    await taking
    assert ids_of(new, "s") == [1]
    with pytest.raises(FencedError):
        await old.append(chunk("s", 2), epoch=epoch)
    old.close()
    new.close()


async def test_a_commit_of_a_connection_that_was_given_up_comes_too_late(url: str) -> None:
    journal = connect(url)
    await journal.append(chunk("s", 1))
    works = [Append([Row("s", "chunk", 1, 1, b"{}", bytes(4), bytes(4))])]
    stuck = journal._connect()
    await journal.append(chunk("s", 2))
    journal._write(stuck, works, journal._commits)
    stuck.close()
    assert ids_of(journal, "s") == [1, 2]
    journal.close()


async def test_tokens_of_all_processes_are_counted(url: str) -> None:
    journals = [connect(url) for _ in range(3)]
    for n, journal in enumerate(journals):
        await journal.append(chunk(f"s{n}", 1, 2), chunk("shared", n))
    await journals[0].delete("s1")
    assert [journal.tokens() for journal in journals] == [TokenCounts(9, 9)] * 3
    for journal in journals:
        journal.close()
    again = connect(url)
    assert again.tokens() == TokenCounts(9, 9)
    again.close()


@pytest.mark.parametrize(("durability", "setting"), [("process", "off"), ("power", "on")])
async def test_what_a_commit_survives_is_the_servers_synchronous_commit(
    url: str, durability: Durability, setting: str
) -> None:
    journal = connect(url, durability)
    with journal._connect() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == (setting,)
    journal.close()


def test_processes_that_start_at_once_make_one_schema(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        journals = list(pool.map(connect, [url] * 4))
    for journal in journals:
        assert journal.open_sessions() == []
        journal.close()


def test_a_server_that_is_not_there_is_named_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "BUSY_TIMEOUT_S", 0.1)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1") as caught:
        open_journal("postgresql://me:open-sesame@127.0.0.1:1/db")
    assert "open-sesame" not in str(caught.value)
