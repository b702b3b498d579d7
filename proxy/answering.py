"""One turn's answer in the making: all its choices in one sequence of events that any number of readers follow."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple

from proxy.generation import Generation, Services
from proxy.trajectory.answer import Delta
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Turn


class Event(NamedTuple):
    """A step of one choice; ``delta`` None: the choice is over."""

    choice: int
    delta: Delta | None


class Answering:
    """``events`` only grows; every reader keeps its own position in it. Readers attach, and detach when they go.

    ``whole``: they read it when it is done.
    """

    def __init__(self, services: Services, session: Session, turn: Turn, *, whole: bool = False) -> None:
        self.turn = turn
        self.events: list[Event] = []
        self.leaving = False
        """The last reader went away; it ends as soon as the engines let go."""
        self._readers = 0
        self._told = False
        self.lost: Exception | None = None
        """Why this process does not have the session any more."""
        self._open = len(turn.choices)
        self._waiters: set[asyncio.Future[bool]] = set()
        self._generations: list[Generation] = []
        self._generations += [
            Generation(services, session, turn, choice, partial(self._show, choice.index), whole=whole)
            for choice in turn.choices
        ]

    @property
    def done(self) -> bool:
        """No choice is open."""
        return self._open == 0

    @property
    def error(self) -> Exception | None:
        """Of the first choice that failed."""
        return next((g.error for g in self._generations if g.error is not None), None)

    @property
    def finished(self) -> bool:
        """Every choice ended by itself."""
        return self.turn.finished

    def attach(self) -> None:
        """A reader comes."""
        self._readers += 1

    @property
    def left(self) -> bool:
        """All readers went away, none of them with the whole answer."""
        return self._readers == 0 and not self._told

    def detach(self, *, told: bool) -> None:
        """A reader goes; ``told``: with the whole answer. Without readers the engines are told to stop."""
        self._readers -= 1
        self._told = self._told or told
        if self._readers == 0:
            self.stop()

    def stop(self) -> None:
        """Leave the engines; what was generated stays, and the turn can be continued."""
        self.leaving = self.leaving or not self.done
        for generation in list(self._generations):
            generation.stop()

    def lose(self, error: Exception) -> None:
        """Another process goes on with it."""
        if not self.done:
            self.lost = error
            self.stop()

    async def news(self, seen: int, timeout_s: float = 3600.0) -> bool:
        """Wait for more than ``seen`` events or the end; False: nothing came in ``timeout_s``."""
        if len(self.events) > seen or self.done:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(timeout_s, _settle, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    async def gone(self) -> None:
        """Wait for the end of every owner, however it ends."""
        for generation in self._generations:
            await generation.gone()

    def _show(self, choice: int, deltas: list[Delta], done: bool) -> None:
        self.events += [Event(choice, delta) for delta in deltas]
        if done:
            self._open -= 1
            self.events.append(Event(choice, None))
            if self.turn.choices[choice].status == "failed":
                self.stop()  # the answer as a whole has failed
        for waiter in self._waiters:
            _settle(waiter, True)


def _settle(waiter: asyncio.Future[bool], news: bool) -> None:
    if not waiter.done():
        waiter.set_result(news)
