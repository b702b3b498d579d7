"""When each node was generating, and how many tokens went where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.ledger import Ledger

MERGE_GAP_S = 0.05
"""Pauses shorter than this between two generations count as busy: they are our own turn-round."""


@dataclass(slots=True)
class Counters:
    """Since the process started. ``undelivered``: computed by an engine but never acknowledged."""

    delivered: int = 0
    undelivered: int = 0


@dataclass(slots=True)
class _Busy:
    live: int = 0
    start: float = 0.0
    end: float | None = None


class BusyMeter:
    """Stretches in which a node had at least one live generation of a run; flushed to the ledger by :meth:`flush`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._busy: dict[tuple[str, str], _Busy] = {}
        self._closed: list[tuple[str, str, float, float]] = []

    def enter(self, run: str, node: str) -> None:
        """A generation starts on ``node``."""
        now = self._clock()
        busy = self._busy.setdefault((run, node), _Busy(start=now))
        if busy.live == 0 and busy.end is not None and now - busy.end > MERGE_GAP_S:
            self._closed.append((run, node, busy.start, busy.end))
            busy.start = now
        busy.live += 1
        busy.end = None

    def leave(self, run: str, node: str) -> None:
        """A generation on ``node`` ends."""
        busy = self._busy[run, node]
        busy.live -= 1
        if busy.live == 0:
            busy.end = self._clock()

    def take(self) -> list[tuple[str, str, float, float]]:
        """``(run, node, start, end)`` to record; one that goes on is given up to now, and later again."""
        now = self._clock()
        taken, self._closed = self._closed, []
        for (run, node), busy in list(self._busy.items()):
            taken.append((run, node, busy.start, now if busy.end is None else busy.end))
            if busy.end is not None and now - busy.end > MERGE_GAP_S:
                del self._busy[run, node]
        return [stretch for stretch in taken if stretch[3] > stretch[2]]

    async def flush(self, ledger: Ledger) -> None:
        """Write what was taken."""
        stretches = self.take()
        if stretches:
            await asyncio.to_thread(_record, ledger, stretches)


def _record(ledger: Ledger, stretches: list[tuple[str, str, float, float]]) -> None:
    for run, node, start, end in stretches:
        ledger.record_interval(run, node, "generate", start, end)
