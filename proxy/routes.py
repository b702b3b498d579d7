"""Which engine may take the next generation, and who is on each.

The table is written to the ledger before it is in force, so it survives a
restart. A route belongs to a lease, and serves one run; a newer epoch of its
node replaces it, an older one is refused. *held* stops new starts, *closed*
also cuts what runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from proxy.meter import BusyMeter
from proxy.upstream import DRAIN_S
from storage.errors import DeadlineError, EngineError
from storage.ledger import Ledger, Route
from workers.engines.base import Engine

_log = logging.getLogger(__name__)

EngineFactory = Callable[[Route], Engine]

AFFINITY_SLACK = 8
"""A session stays with the engine whose prefix cache it filled unless the idlest has so many generations fewer."""
SUSPECT_S = 1.0
"""An engine that just failed is the last choice for so long."""
DRAIN_LIMIT_S = 30.0
"""Deadline for the generations of a closed route to let go of it."""


@dataclass(eq=False, slots=True)
class _Entry:
    route: Route
    engine: Engine
    uses: set[RouteUse] = field(default_factory=set)
    suspect_until: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class RouteUse:
    """One generation on one route, from :meth:`RouteTable.acquire` to :meth:`RouteTable.release`."""

    run: str
    route: Route
    engine: Engine
    entry: _Entry
    on_cut: Callable[[asyncio.Future[None] | None], None] | None = None
    """Called once when the route is closed under the generation, with the abort of all that its engine has, if there
    was one."""
    cut: bool = False

    def end(self, all_aborted: asyncio.Future[None] | None = None) -> None:
        """Tell the generation to leave."""
        if not self.cut:
            self.cut = True
            if self.on_cut is not None:
                self.on_cut(all_aborted)


class RouteTable:
    """See the module. ``make_engine`` builds the adapter for a route.

    Where several proxies share the ledger, ``spread`` makes a change known to the others and returns when it is in
    force there; and nothing starts, or goes on, after ``lease_until`` (monotonic time), since a change may be in force
    without this proxy by then.
    """

    def __init__(self, ledger: Ledger, make_engine: EngineFactory, meter: BusyMeter) -> None:
        self.lease_until = math.inf
        self.spread: Callable[[int], Awaitable[None]] | None = None
        self._ledger = ledger
        self._make_engine = make_engine
        self._meter = meter
        self._generation = 0
        self._entries: dict[str, _Entry] = {}
        self._draining: dict[_Entry, int] = {}
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def in_force(self) -> int:
        """The newest generation of the ledger's routes that is in force here, with all before it."""
        return min((generation - 1 for generation in self._draining.values()), default=self._generation)

    async def load(self) -> None:
        """Act on what the ledger has; returns when that is in force here.

        Raises DeadlineError if generations do not let go of a route that was closed.
        """
        async with self._writing:
            leaving = await self._load()
        await self._drained(leaving)

    async def put(self, route: Route) -> None:
        """Set a route; returns when it is in force, for a closed one when nothing runs on it any more.

        Raises FencedError for an epoch out of date, DeadlineError if generations do not let go.
        """
        await self._change(partial(self._ledger.put_route, route))

    async def delete(self, lease: str, epoch: int) -> None:
        """Close and forget a route. Raises FencedError if a newer epoch owns it."""
        await self._change(partial(self._ledger.delete_route, lease, epoch))

    def suspend(self) -> None:
        """Cut everything that runs: the lease has run out."""
        for entry in self._entries.values():
            for use in list(entry.uses):
                use.end()

    def renewed(self, lease_until: float) -> None:
        """The lease lasts until then; what waited may start."""
        self.lease_until = lease_until
        self._announce()

    def describe(self, run: str | None = None) -> list[dict[str, Any]]:
        """Every route, or those of one run, with its number of live generations."""
        chosen = [entry for entry in self._entries.values() if run in (None, entry.route.run)]
        return [{**asdict(entry.route), "live": len(entry.uses)} for entry in chosen]

    async def acquire(
        self, run: str, affinity: str | None, deadline: float, what: str, *, version: int | None = None
    ) -> RouteUse:
        """The best open route of ``run``, now or as soon as there is one; ``deadline`` is monotonic time.

        With ``version`` only engines that serve those weights will do. Raises DeadlineError naming ``what`` waited.
        """
        while True:
            entry = self._choose(run, affinity, version)
            if entry is not None:
                use = RouteUse(run, entry.route, entry.engine, entry)
                entry.uses.add(use)
                self._meter.enter(run, entry.route.node)
                return use
            changed = self._changed
            left = deadline - time.monotonic()
            if left <= 0:
                weights = "" if version is None else f" with weights {version}"
                raise DeadlineError(f"{what} waited for an open route{weights} until its limit (pipeline.hold_limit_s)")
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    def release(self, use: RouteUse, *, suspect: bool = False) -> None:
        """The generation left; ``suspect``: because the engine failed."""
        self._meter.leave(use.run, use.route.node)
        use.cut = True
        use.entry.uses.discard(use)
        if suspect:
            use.entry.suspect_until = time.monotonic() + SUSPECT_S
        if not use.entry.uses:
            use.entry.idle.set()
            self._draining.pop(use.entry, None)

    async def close(self) -> None:
        """Release the adapters."""
        for entry in self._entries.values():
            await entry.engine.close()

    async def _change(self, write: Callable[[], int]) -> None:
        async with self._writing:
            generation = await asyncio.to_thread(write)
            leaving = await self._load()
        await self._drained(leaving)
        if self.spread is not None:
            await self.spread(generation)

    async def _load(self) -> list[_Entry]:
        """Take over the ledger's routes; returns the entries whose generations must leave."""
        table = await asyncio.to_thread(self._ledger.route_table)
        there = {route.lease for route in table.routes}
        leaving = [self._entries.pop(lease) for lease in list(self._entries) if lease not in there]
        for route in table.routes:
            leaving += self._set(route)
        for entry in leaving:
            if entry.uses:
                self._draining.setdefault(entry, table.generation)
        self._generation = table.generation
        self._announce()
        return leaving

    def _set(self, route: Route) -> list[_Entry]:
        old = self._entries.get(route.lease)
        if old is not None and (old.route.url, old.route.epoch) == (route.url, route.epoch):
            old.route = route
            if route.state == "closed":
                return [old]
            self._draining.pop(old, None)
            return []
        self._entries[route.lease] = _Entry(route, self._make_engine(route))
        return [] if old is None else [old]

    async def _drained(self, leaving: list[_Entry]) -> None:
        """Have all generations leave; their engine is told once for all of them."""
        aborts: dict[_Entry, asyncio.Future[None]] = {}
        for entry in leaving:
            entry.idle.clear()
            uses = list(entry.uses)
            if uses:
                aborts[entry] = asyncio.ensure_future(_abort_all(entry.engine))
            for use in uses:
                use.end(aborts.get(entry))
        for entry in leaving:
            if entry in aborts:
                await aborts[entry]
            if entry.uses:
                await self._idle(entry)
            if self._entries.get(entry.route.lease) is not entry:
                await entry.engine.close()

    async def _idle(self, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(DRAIN_LIMIT_S):
                await entry.idle.wait()
        except TimeoutError:
            raise DeadlineError(
                f"closing route {entry.route.lease!r}: {len(entry.uses)} generations still on it "
                f"after {DRAIN_LIMIT_S:g} s"
            ) from None

    def _choose(self, run: str, affinity: str | None, version: int | None) -> _Entry | None:
        candidates = [
            entry
            for entry in self._entries.values()
            if (entry.route.run, entry.route.state) == (run, "open") and version in (None, entry.route.version)
        ]
        if not candidates:
            return None
        now = time.monotonic()
        if now >= self.lease_until:
            return None
        best = min(candidates, key=lambda entry: (entry.suspect_until > now, len(entry.uses)))
        favourite = next((entry for entry in candidates if entry.route.lease == affinity), None)
        if favourite is None or favourite.suspect_until > now:
            return best
        return favourite if len(favourite.uses) <= len(best.uses) + AFFINITY_SLACK else best

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _abort_all(engine: Engine) -> None:
    """An engine that does not answer is left to its requests, which are dropped one by one."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await engine.abort(None)
    except (EngineError, TimeoutError) as error:
        _log.info("abort of all that an engine has: %s", error)
