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
from proxy.peers import Peers
from proxy.routes import EngineFactory, RouteTable
from proxy.runs import Runs
from proxy.samples import SampleDesk
from proxy.session_desk import SessionDesk
from proxy.sessions import Sessions, restore
from proxy.shard_writer import ShardWriter
from proxy.status import Status
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
    """One proxy process. ``base_url`` is where agents reach it. Call :meth:`start` in the serving loop.

    With a ``peer_key``, the cluster's control key, it is one of several that share the ledger and the journal.
    """

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        store: Store,
        make_engine: EngineFactory,
        *,
        base_url: str,
        peer_key: str | None = None,
    ) -> None:
        self.ledger = ledger
        self.journal = journal
        self._store = store
        self.counters = Counters()
        self._meter = BusyMeter()
        self.routes = RouteTable(ledger, make_engine, self._meter)
        self.runs = Runs(ledger)
        services = Services(journal, self.routes, self.counters)
        self.peers = None if peer_key is None else Peers(ledger, journal, self.routes, base_url, peer_key)
        self.sessions = Sessions(ledger, journal, self.runs, services, base_url, self.peers)
        if self.peers is not None:
            self.peers.lost = self.sessions.lose_all
        self.writer = ShardWriter(ledger, store, self.sessions)
        self.desk = SampleDesk(ledger, self.runs, self.sessions, self.writer)
        self.session_desk = SessionDesk(ledger, self.runs, self.sessions, self.desk)
        self.housekeeping = Housekeeping(ledger, journal, self.sessions, self.desk)
        self._status = Status(
            ledger, journal, self.runs, self.sessions, self.routes, self.counters, self.writer, self.peers
        )
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take over routes, sessions, and the groups that were complete but unwritten."""
        if self.peers is None:
            await self.routes.load()
            known = await asyncio.to_thread(self.ledger.sessions_of, None, open_only=True)
            self._background.append(asyncio.create_task(self.sessions.recover(known), name="count turns"))
        else:
            await self.peers.start()
        for info in await asyncio.to_thread(self.ledger.runs):
            if info.stopped is None:
                self.writer.kick(info.run)
        self._background.append(asyncio.create_task(self._tick(), name="proxy flush"))
        self._background.append(asyncio.create_task(self.housekeeping.run(), name="housekeeping"))

    async def close(self) -> None:
        """Stop background work and write what is due."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.writer.close()
        await self.sessions.close()
        if self.peers is not None:
            await self.peers.close()
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

    def activity(self, run: str) -> dict[str, Any]:
        """What this process alone knows of a run."""
        return self._status.activity(run)

    async def audit(self, run: str) -> dict[str, Any]:
        """Journal against shards, after everything complete was written."""
        renderer = (await self.runs.get(run)).renderer
        await self.writer.sweep(run)

        def rebuild(session: str) -> Session:
            return restore(self.journal, self.ledger.session(session), renderer)

        return await asyncio.to_thread(audit, run, self.ledger, self._store, rebuild)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._status.rate.note(self.counters.delivered)
            try:
                await self._meter.flush(self.ledger)
            except SeamlessFlowError as error:
                _log.error("busy intervals were not recorded: %s", error)
