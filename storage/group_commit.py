"""Group commit: many small writes, one transaction, one thread.

An idle writer commits at once; a busy one collects what arrives within 5 ms of
its last commit, or 256 KB, whichever comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from storage.errors import DeadlineError, StorageError

T = TypeVar("T")

LINGER_S = 0.005
LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    item: T
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class GroupCommit(Generic[T]):
    """Runs ``commit`` in one thread over all items that have arrived, in order of arrival.

    ``commit`` writes its items as one transaction: when it raises, none of them is written.
    """

    def __init__(self, name: str, commit: Callable[[Sequence[T]], None]) -> None:
        self._commit = commit
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[T]] = []
        self._bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def submit(self, item: T, size: int) -> None:
        """Returns when the item is committed; ``size`` is its share of the byte limit.

        An item whose waiter is cancelled is committed all the same.

        Raises:
            StorageError: it was not committed, or the writer is closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._closed:
                raise StorageError(f"{self._thread.name} is closed: nothing can be written any more")
            self._waiting.append(_Waiting(item, loop, future))
            self._bytes += size
            # While the writer lingers only the byte limit may wake it: one wake-up per commit, not per item.
            if len(self._waiting) == 1 or self._bytes >= LIMIT_BYTES:
                self._changed.notify()
        await future

    def close(self, deadline_s: float = 30.0) -> None:
        """Commit what has arrived and stop. Raises DeadlineError if that takes longer than ``deadline_s``."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"waited {deadline_s:.0f} s for {self._thread.name} to commit its last records")

    def _run(self) -> None:
        last = float("-inf")
        while batch := self._take(last + LINGER_S):
            error: Exception | None = None
            try:
                self._commit([waiting.item for waiting in batch])
            except Exception as failure:  # noqa: BLE001 - whatever it is belongs to the waiters; the thread must go on
                error = failure
            last = time.monotonic()
            _answer(batch, error)

    def _take(self, not_before: float) -> list[_Waiting[T]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            linger = not_before - time.monotonic()
            if linger > 0:
                self._changed.wait_for(lambda: self._bytes >= LIMIT_BYTES or self._closed, timeout=linger)
            batch, self._waiting, self._bytes = self._waiting, [], 0
            return batch


def _answer(batch: Sequence[_Waiting[T]], error: Exception | None) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiting in batch:
        by_loop.setdefault(waiting.loop, []).append(waiting.future)
    for loop, futures in by_loop.items():
        # A loop that was closed in the meantime has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, futures, error)


def _resolve(futures: Sequence[asyncio.Future[None]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            failure = StorageError(f"not committed: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
