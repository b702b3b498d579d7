"""What PostgreSQL does that SQLite does not: writers at the same time, deadlocks, lost connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from postgres import PostgresServer

from storage.books import database
from storage.books.database import Database, Part
from storage.books.schema import runs
from storage.errors import DeadlineError, FencedError, StorageError
from storage.ledger import TRAIN, Ledger, Route, SessionRecord, State


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.database()
    yield url
    postgres.drop(url)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that start together, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def start(call: Callable[[], Any]) -> Any:
        barrier.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(start, calls))


def test_processes_that_start_at_once_make_one_schema(url: str) -> None:
    for ledger in at_once(*[lambda: Ledger(url)] * 4):
        assert ledger.runs() == []
        ledger.close()


def test_workers_that_claim_at_once_get_different_samples(url: str) -> None:
    ledgers = [Ledger(url) for _ in range(4)]
    ledgers[0].create_run("demo", {}, "digest")
    ledgers[0].set_admission("demo", TRAIN, admit_until=50, target_in_flight=150, samples_per_task=4)

    def claim(ledger: Ledger, worker: str) -> list[Any]:
        return [claim for _ in range(10) for claim in ledger.claim_samples("demo", TRAIN, worker, 4)]

    taken = at_once(*(lambda w=w, ledger=ledger: claim(ledger, f"w{w}") for w, ledger in enumerate(ledgers)))
    claims = [claim for claims in taken for claim in claims]
    assert len(claims) == len(set(claims)) == 150
    assert len(ledgers[0].samples("demo", TRAIN, state=State.RUNNING)) == 150
    assert ledgers[0].books("demo").balanced
    for ledger in ledgers:
        ledger.close()


def test_the_newest_epoch_of_a_node_wins_whatever_the_order_of_first_routes(url: str) -> None:
    ledger = Ledger(url)

    def put(node: str, epoch: int) -> None:
        # An older epoch that comes late is refused, as it should be.
        with contextlib.suppress(FencedError):
            ledger.put_route(Route(f"{node}/{epoch}", "demo", node, "http://e", "scripted", epoch, 0, "open"))

    nodes = [f"n{i}" for i in range(20)]
    for node in nodes:
        at_once(*(lambda node=node, epoch=epoch: put(node, epoch) for epoch in (1, 2, 3)))
    assert [(route.node, route.epoch) for route in ledger.routes()] == sorted((node, 3) for node in nodes)
    ledger.close()


def test_the_same_sessions_entered_at_once_are_entered_once(url: str) -> None:
    ledger = Ledger(url)
    records = [SessionRecord(f"s{i}", f"h{i}", "demo", None, 0) for i in range(50)]
    at_once(lambda: ledger.put_session(*records), lambda: ledger.put_session(*reversed(records)))
    assert len(ledger.sessions_of("demo")) == 50
    ledger.close()


class Crossing(Part):
    """Locks two runs in the order given, meeting the other caller in between."""

    def __init__(self, database: Database, barrier: threading.Barrier) -> None:
        super().__init__(database)
        self.calls = 0
        self._barrier = barrier

    def lock(self, *names: str) -> str:
        with self._db.write() as connection:
            for name in names:
                self.calls += 1
                connection.execute(sa.select(runs.c.run).where(runs.c.run == name).with_for_update())
                if self.calls <= 2:
                    self._barrier.wait(30)
        return names[0]


def test_a_transaction_that_the_server_gives_up_for_another_is_repeated(url: str) -> None:
    ledger = Ledger(url)
    for name in ("a", "b"):
        ledger.create_run(name, {}, "digest")
    crossing = Crossing(ledger._db, threading.Barrier(2))
    assert at_once(lambda: crossing.lock("a", "b"), lambda: crossing.lock("b", "a")) == ["a", "b"]
    assert crossing.calls > 4, "nobody was turned back: this was no deadlock"
    ledger.close()


def test_a_writer_waits_for_another_no_longer_than_its_deadline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    ledger = Ledger(url)
    ledger.create_run("demo", {}, "digest")
    with ledger._db.write() as connection:
        connection.execute(sa.select(runs).with_for_update())
        with pytest.raises(DeadlineError, match="another process's write"):
            ledger.set_run_state("demo", "running")
    ledger.close()


def test_a_ledger_goes_on_after_its_connections_were_cut(postgres: PostgresServer, url: str) -> None:
    ledger = Ledger(url)
    ledger.create_run("demo", {}, "digest")
    assert postgres.cut_connections(url) > 0
    ledger.set_run_state("demo", "running")
    assert ledger.run_info("demo").state == "running"
    ledger.close()


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(StorageError, match=r"127\.0\.0\.1") as caught:
        Ledger("postgresql://me:open-sesame@127.0.0.1:1/db")
    assert "open-sesame" not in str(caught.value)
