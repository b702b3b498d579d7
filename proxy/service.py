"""The proxy's parts, put together: what the two APIs call, and what runs beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from proxy.audit import audit
from proxy.generation import Services
from proxy.housekeeping import Housekeeping
from proxy.meter import BusyMeter, Counters
from proxy.routes import EngineFactory, RouteTable
from proxy.runs import Runs
from proxy.samples import SampleDesk
from proxy.session_desk import SessionDesk
from proxy.sessions import Sessions, restore
from proxy.shard_writer import ShardWriter
from proxy.status import Status, count_turns
from proxy.trajectory.session import Session
from storage.errors import SeamlessFlowError
from storage.journal import Journal
from storage.ledger import Ledger

FLUSH_S = 1.0
"""How often busy intervals are written and the token rate is sampled."""

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What is needed of the object store."""

    def put(self, key: str, data: bytes) -> str: ...

    def list(self, prefix: str = "") -> list[str]: ...

    def get(self, key: str, *, sha256: str | None = None) -> bytes: ...


class Service:
    """One proxy process. ``base_url`` is where agents reach it. Call :meth:`start` in the serving loop."""

    def __init__(
        self, ledger: Ledger, journal: Journal, store: Store, make_engine: EngineFactory, *, base_url: str
    ) -> None:
        self.ledger = ledger
        self.journal = journal
        self._store = store
        self.counters = Counters()
        self._meter = BusyMeter()
        self.routes = RouteTable(ledger, make_engine, self._meter)
        self.runs = Runs(ledger)
        services = Services(journal, self.routes, self.counters)
        self.sessions = Sessions(ledger, journal, self.runs, services, base_url)
        self.writer = ShardWriter(ledger, store, self.sessions)
        self.desk = SampleDesk(ledger, self.runs, self.sessions, self.writer)
        self.session_desk = SessionDesk(ledger, self.runs, self.sessions, self.desk)
        self.housekeeping = Housekeeping(ledger, self.sessions, self.desk)
        self._status = Status(ledger, journal, self.runs, self.sessions, self.routes, self.counters)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take over routes, counts, and the groups that were complete but unwritten."""
        await self.routes.load()
        for info in await asyncio.to_thread(self.ledger.runs):
            if info.stopped is None:
                self.writer.kick(info.run)
                await self._recount(info.run)
        self._background.append(asyncio.create_task(self._tick(), name="proxy flush"))
        self._background.append(asyncio.create_task(self.housekeeping.run(), name="housekeeping"))

    async def close(self) -> None:
        """Stop background work and write what is due."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.writer.close()
        await self.sessions.close()
        await self._meter.flush(self.ledger)
        await self.routes.close()

    async def create_run(self, run: str, spec: Mapping[str, Any], spec_digest: str) -> None:
        """Register a run; see :meth:`proxy.runs.Runs.create`."""
        await self.runs.create(run, spec, spec_digest)

    async def set_admission(self, run: str, stream: str, **limits: Any) -> None:
        """Say what of a stream may start."""
        await asyncio.to_thread(self.ledger.set_admission, run, stream, **limits)

    async def run_status(self, run: str) -> dict[str, Any]:
        """State of a run, busy intervals up to now included."""
        await self._meter.flush(self.ledger)
        return await self._status.run(run)

    async def audit(self, run: str) -> dict[str, Any]:
        """Journal against shards, after everything complete was written."""
        renderer = (await self.runs.get(run)).renderer
        await self.writer.sweep(run)

        def rebuild(session: str) -> Session:
            return restore(self.journal, self.ledger.session(session), renderer)

        return await asyncio.to_thread(audit, run, self.ledger, self._store, rebuild)

    async def _recount(self, run: str) -> None:
        """Count the turns of earlier processes: open sessions now, before they go on; closed ones in the background."""
        records = await asyncio.to_thread(self.ledger.sessions_of, run)
        await self._count(run, [record.session for record in records if not record.closed])
        closed = [record.session for record in records if record.closed]
        self._background.append(asyncio.create_task(self._count(run, closed), name=f"count turns of {run}"))

    async def _count(self, run: str, sessions: list[str]) -> None:
        turns, forks = await asyncio.to_thread(count_turns, self.journal, sessions)
        self.counters.turns[run] += turns
        self.counters.forks[run] += forks

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._status.rate.note(self.counters.delivered)
            try:
                await self._meter.flush(self.ledger)
            except SeamlessFlowError as error:
                _log.error("busy intervals were not recorded: %s", error)
