"""Which engine may take the next generation, and who is on each.

The table is written to the ledger before it is in force, so it survives a
restart. A route belongs to a lease, and serves one run; a newer epoch of its
node replaces it, an older one is refused. *held* stops new starts, *closed*
also cuts what runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.meter import BusyMeter
from storage.errors import DeadlineError, FencedError
from storage.ledger import Ledger, Route
from workers.engines.base import Engine

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
    on_cut: Callable[[], None] | None = None
    """Called once when the route is closed under the generation."""
    cut: bool = False

    def end(self) -> None:
        """Tell the generation to leave."""
        if not self.cut:
            self.cut = True
            if self.on_cut is not None:
                self.on_cut()


class RouteTable:
    """See the module. ``make_engine`` builds the adapter for a route."""

    def __init__(self, ledger: Ledger, make_engine: EngineFactory, meter: BusyMeter) -> None:
        self._ledger = ledger
        self._make_engine = make_engine
        self._meter = meter
        self._entries: dict[str, _Entry] = {}
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Take over what the ledger has; called once at start."""
        for route in await asyncio.to_thread(self._ledger.routes):
            self._entries[route.lease] = _Entry(route, self._make_engine(route))
        self._announce()

    async def put(self, route: Route) -> None:
        """Set a route; returns when it is in force here, for a closed one when nothing runs on it any more.

        Raises FencedError for an epoch out of date, DeadlineError if generations do not let go.
        """
        async with self._writing:
            await asyncio.to_thread(self._ledger.put_route, route)
            leaving = self._replace(route)
            self._announce()
        await self._drained(leaving)
        for entry in leaving:
            if self._entries.get(entry.route.lease) is not entry:
                await entry.engine.close()

    async def delete(self, lease: str, epoch: int) -> None:
        """Close and forget a route. Raises FencedError if a newer epoch owns it."""
        async with self._writing:
            await asyncio.to_thread(self._ledger.delete_route, lease, epoch)
            entry = self._entries.pop(lease, None)
            self._announce()
        if entry is not None:
            await self._drained([entry])
            await entry.engine.close()

    def describe(self, run: str | None = None) -> list[dict[str, Any]]:
        """Every route, or those of one run, with its number of live generations."""
        chosen = [entry for entry in self._entries.values() if run in (None, entry.route.run)]
        return [{**asdict(entry.route), "live": len(entry.uses)} for entry in chosen]

    async def acquire(self, run: str, affinity: str | None, deadline: float, what: str) -> RouteUse:
        """The best open route of ``run``, now or as soon as there is one; ``deadline`` is monotonic time.

        Raises DeadlineError naming ``what`` waited.
        """
        while True:
            entry = self._choose(run, affinity)
            if entry is not None:
                use = RouteUse(run, entry.route, entry.engine, entry)
                entry.uses.add(use)
                self._meter.enter(run, entry.route.node)
                return use
            changed = self._changed
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{what} waited for an open route until its limit (pipeline.hold_limit_s)")
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

    async def close(self) -> None:
        """Release the adapters."""
        for entry in self._entries.values():
            await entry.engine.close()

    def _replace(self, route: Route) -> list[_Entry]:
        """Put ``route`` into the table; returns the entries whose generations must leave."""
        leaving = []
        for lease, entry in list(self._entries.items()):
            if entry.route.node == route.node and entry.route.epoch > route.epoch:
                raise FencedError(f"node {route.node!r} is at epoch {entry.route.epoch}, not {route.epoch}")
            if entry.route.node == route.node and entry.route.epoch < route.epoch and lease != route.lease:
                leaving.append(self._entries.pop(lease))
        old = self._entries.get(route.lease)
        if old is not None and (old.route.url, old.route.epoch) == (route.url, route.epoch):
            old.route = route
            if route.state == "closed":
                leaving.append(old)
            return leaving
        self._entries[route.lease] = _Entry(route, self._make_engine(route))
        return leaving if old is None else [*leaving, old]

    async def _drained(self, leaving: list[_Entry]) -> None:
        for entry in leaving:
            entry.idle.clear()
            for use in list(entry.uses):
                use.end()
        for entry in leaving:
            if not entry.uses:
                continue
            try:
                async with asyncio.timeout(DRAIN_LIMIT_S):
                    await entry.idle.wait()
            except TimeoutError:
                raise DeadlineError(
                    f"closing route {entry.route.lease!r}: {len(entry.uses)} generations still on it "
                    f"after {DRAIN_LIMIT_S:g} s"
                ) from None

    def _choose(self, run: str, affinity: str | None) -> _Entry | None:
        candidates = [
            entry for entry in self._entries.values() if (entry.route.run, entry.route.state) == (run, "open")
        ]
        if not candidates:
            return None
        now = time.monotonic()
        best = min(candidates, key=lambda entry: (entry.suspect_until > now, len(entry.uses)))
        favourite = next((entry for entry in candidates if entry.route.lease == affinity), None)
        if favourite is None or favourite.suspect_until > now:
            return best
        return favourite if len(favourite.uses) <= len(best.uses) + AFFINITY_SLACK else best

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
