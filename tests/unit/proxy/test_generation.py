"""Invariant I3 at its source: nothing is shown before it is in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from proxy.answering import Answering
from proxy.dialects.base import TurnRequest
from proxy.generation import Services
from proxy.meter import BusyMeter, Counters
from proxy.routes import RouteTable
from proxy.testing import toy_ids, write_toy_model
from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Policy
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.session import Session
from storage.errors import StorageError
from storage.ledger import Ledger, Route
from workers.engines.base import Chunk, Finish


class Engine:
    async def generate(self, ids, sampling, *, request_id, salt) -> AsyncGenerator[Chunk, None]:
        for token in toy_ids("ab"):
            yield Chunk((token,), (-0.5,), 0)
        yield Chunk((), (), 0, finish=Finish("stop"))

    async def abort(self, request_id):
        return None

    async def close(self):
        return None


class GatedJournal:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.broken = False

    async def append(self, *records):
        self.asked.set()
        await self.gate.wait()
        if self.broken:
            raise StorageError("the disk is full")


@pytest.fixture
async def start(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    routes = RouteTable(ledger, lambda route: Engine(), BusyMeter())
    await routes.put(Route("lease", "run", "node", "http://nowhere", "scripted", 1, 0, "open"))

    def begin(journal):
        renderer = Renderer(write_toy_model(tmp_path / "model"))
        session = Session("s", "run", Policy(model="toy", max_context=400), renderer)
        request = TurnRequest((Message("user", "hi"),))
        placement = session.place(request)
        turn = session.begin(placement, request, session.decide(placement, request), generations=["g"], created=1)
        return Answering(Services(journal, routes, Counters()), session, turn)

    yield begin
    ledger.close()


async def test_tokens_are_shown_only_after_they_are_in_the_journal(start):
    journal = GatedJournal()
    answering = start(journal)
    async with asyncio.timeout(10):
        await journal.asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert answering.events == []
    assert not answering.done
    journal.gate.set()
    await answering.gone()
    assert "".join(event.delta.text for event in answering.events if event.delta) == "ab"


async def test_a_journal_that_fails_ends_the_generation_as_infrastructure_with_nothing_shown(start):
    journal = GatedJournal()
    journal.broken = True
    journal.gate.set()
    answering = start(journal)
    await answering.gone()
    assert all(event.delta is None for event in answering.events)
    assert isinstance(answering.error, StorageError)
    choice = answering.turn.choices[0]
    assert (choice.status, choice.infra) == ("failed", True)
