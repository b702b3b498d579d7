"""The model thread: runs forward passes, and between two of them whatever the event loop asks for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from storage.errors import EngineUnavailable
from workers.engines.embedded.scheduler import Outbox, Scheduler

T = TypeVar("T")
log = logging.getLogger(__name__)

FLUSH_S = (0.02, 0.1)
"""Tokens wait so long for others to share an event with: the first where few requests run, the second at most."""
EVENTS_PER_S = 500
"""So many events are sent in a second, as far as the longest wait allows: each costs this process and its reader more
than a token does."""


class ModelThread:
    """Owns ``scheduler``; everyone else reaches it through :meth:`call`. Sleeps when there is nothing to do.

    Args:
        loop: events and results are delivered there.
        on_failure: called there if a forward pass raises; nothing runs after that.
    """

    def __init__(
        self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._scheduler = scheduler
        self._loop = loop
        self._on_failure = on_failure
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._flushed = 0.0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` between two forward passes; commands keep their order."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def call(self, function: Callable[[Scheduler], T]) -> T:
        """Run ``function`` between two forward passes; returns after all events before it were delivered."""
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine's model thread has ended")
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            outcome = _outcome(function, self._scheduler)
            self._deliver()
            self._loop.call_soon_threadsafe(_settle, future, outcome)

        self.post(command)
        return await future

    async def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait():
                    self._turn()
        except Exception as error:  # no model, no engine: whoever started the process must know
            log.exception("the model thread failed")
            self._loop.call_soon_threadsafe(self._on_failure, error)

    def _wait(self) -> bool:
        """Sleep until there is work; False: stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._stopping or self._scheduler.runnable)
            return not self._stopping

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        if self._scheduler.runnable:
            self._scheduler.step()
        now = time.monotonic()
        if not self._scheduler.runnable or now - self._flushed >= flush_interval_s(self._scheduler.running):
            self._scheduler.flush()
            self._flushed = now
        self._deliver()

    def _deliver(self) -> None:
        outbox = self._scheduler.take_outbox()
        if outbox:
            self._loop.call_soon_threadsafe(_hand_over, outbox)


def flush_interval_s(running: int) -> float:
    """How long tokens wait while so many requests run.

    >>> [flush_interval_s(running) for running in (1, 32, 64)]
    [0.02, 0.064, 0.1]
    """
    soon, late = FLUSH_S
    return min(late, max(soon, running / EVENTS_PER_S))


def _hand_over(outbox: Outbox) -> None:
    for sink, event in outbox:
        sink(event)


def _outcome(function: Callable[[Scheduler], T], scheduler: Scheduler) -> Callable[[asyncio.Future[T]], None]:
    """Run ``function``; returns how to tell its caller."""
    try:
        result = function(scheduler)
    except Exception as caught:  # noqa: BLE001 - whatever it is, it belongs to the caller
        error = caught
        return lambda future: future.set_exception(error)
    return lambda future: future.set_result(result)


def _settle(future: asyncio.Future[T], outcome: Callable[[asyncio.Future[T]], None]) -> None:
    if not future.done():  # else the caller went away
        outcome(future)
