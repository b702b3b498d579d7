"""Group commit: many small writes, one transaction.

A commit that waits for nothing (no fsync, no server) is made in the event loop:
a thread would cost more than the commit itself. An idle writer commits at once;
what comes within a millisecond of that goes into the next commit, together with
all else that the same turn of the loop brings.

Any other commit is made in a thread. An idle writer commits at once, a busy one
collects what arrives within 5 ms of its last commit, or 256 KB.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

from storage.errors import DeadlineError, SeamlessFlowError, StorageError

T = TypeVar("T")

LINGER_S = 0.005
GAP_S = 0.001
LIMIT_BYTES = 256 * 1024
DEADLINE_S = 120.0

Refusals = Mapping[int, SeamlessFlowError]
"""Why some items of a commit were not written, by their position; all others were."""
Commit = Callable[[Sequence[T]], Refusals]
"""Writes items as one transaction; when it raises, none of them is written."""
_Outcome = Refusals | Exception


class WouldWait(Exception):
    """A commit that must not wait would have to: nothing was written."""


class _Batch(Generic[T]):
    """Items that will share a commit, aligned with who waits for them and until when."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self.futures: list[asyncio.Future[None]] = []
        self.deadlines: list[float] = []
        self.expiry: asyncio.TimerHandle | None = None


class GroupCommit(Generic[T]):
    """Commits items in order of arrival; they come from one event loop at a time.

    Args:
        name: of the writer, for errors and its thread.
        commit: called in the thread.
        quick: the same for the event loop: it raises WouldWait rather than wait. None: every commit has to wait.
    """

    def __init__(self, name: str, commit: Commit[T], quick: Commit[T] | None = None) -> None:
        self._name = name
        self._commit = commit
        self._quick = quick
        self._lock = threading.Lock()  # over all that follows: the thread and close() change it too
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batch = _Batch[T]()
        self._bytes = 0
        self._slow = quick is None
        self._busy = False
        self._closed = False
        self._flushing: asyncio.Handle | None = None
        self._last = float("-inf")
        self._jobs: SimpleQueue[tuple[asyncio.AbstractEventLoop | None, _Batch[T]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def submit(self, item: T, size: int, *, slow: bool = False, deadline_s: float = DEADLINE_S) -> None:
        """Returns when the item is committed; ``size`` is its share of the byte limit, ``slow`` keeps it off the loop.

        An item whose waiter is cancelled is committed all the same.

        Raises:
            StorageError: it was not committed, or the writer is closed; or what the commit refused it with.
            DeadlineError: ``deadline_s`` went by. It may be committed yet.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._enter(loop)
            slow = slow or self._slow or size >= LIMIT_BYTES
            if not slow and not self._busy and not self._batch.items and time.monotonic() - self._last > GAP_S:
                outcome = self._quickly([item])
                if outcome is not None:
                    failure = _failure(outcome, 0)
                    if failure is not None:
                        raise failure
                    return
            future: asyncio.Future[None] = loop.create_future()
            batch = self._batch
            batch.items.append(item)
            batch.futures.append(future)
            batch.deadlines.append(time.monotonic() + deadline_s)
            self._bytes += size
            self._slow = slow
            self._schedule(loop)
            # A quick commit comes with the next turn of the loop.
            if (slow or self._busy) and (batch.expiry is None or deadline_s < DEADLINE_S):
                self._watch(loop, batch)
        await future

    def close(self, deadline_s: float = 30.0) -> None:
        """Commit what has arrived and stop. Raises DeadlineError if that takes longer than ``deadline_s``."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put((self._loop, self._take()))
                self._jobs.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"waited {deadline_s:.0f} s for {self._name} to commit its last records")

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            raise StorageError(f"{self._name} is closed: nothing can be written any more")
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_running():
                raise StorageError(f"{self._name} is in use by another event loop")
            # What an earlier loop left behind goes with the next commit.
            self._loop, self._flushing = loop, None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what waits committed in time; the end of a commit that runs comes here again."""
        if self._busy or not self._batch.items:
            return
        full = self._bytes >= LIMIT_BYTES
        if self._flushing is not None:
            if not full:
                return
            self._flushing.cancel()
        linger = self._last + LINGER_S - time.monotonic() if self._slow and not full else 0.0
        if linger > 0:
            self._flushing = loop.call_later(linger, self._flush, loop)
        else:
            self._flushing = loop.call_soon(self._flush, loop)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._flushing = None
            if self._busy or not self._batch.items:
                return
            slow, batch = self._slow or self._bytes >= LIMIT_BYTES, self._take()
            outcome = None if slow else self._quickly(batch.items)
            if outcome is None:
                self._busy = True
                self._jobs.put((loop, batch))
                if batch.expiry is None:
                    self._watch(loop, batch)
                return
        _resolve(batch, outcome)

    def _take(self) -> _Batch[T]:
        batch, self._batch = self._batch, _Batch[T]()
        self._bytes, self._slow = 0, self._quick is None
        return batch

    def _quickly(self, items: list[T]) -> _Outcome | None:
        """Commit here and now; None: it would have to wait."""
        assert self._quick is not None  # noqa: S101  # without it every batch is slow
        try:
            return self._quick(items)
        except WouldWait:
            return None
        except Exception as failure:  # noqa: BLE001  # whatever it is belongs to the waiters
            return failure
        finally:
            self._last = time.monotonic()

    def _work(self) -> None:
        """The thread."""
        while (job := self._jobs.get()) is not None:
            loop, batch = job
            outcome: _Outcome = {}
            if batch.items:
                try:
                    outcome = self._commit(batch.items)
                except Exception as failure:  # noqa: BLE001  # belongs to the waiters; the thread must go on
                    outcome = failure
            with self._lock:
                self._busy = False
                self._last = time.monotonic()
            # A loop that was closed in the meantime has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                if loop is not None:
                    loop.call_soon_threadsafe(self._answer, loop, batch, outcome)

    def _answer(self, loop: asyncio.AbstractEventLoop, batch: _Batch[T], outcome: _Outcome) -> None:
        _resolve(batch, outcome)
        with self._lock:
            if loop is self._loop:
                self._schedule(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop, batch: _Batch[T]) -> None:
        """Tell those whose deadline has passed, and come back for the next one."""
        now, next_one = time.monotonic(), float("inf")
        for future, deadline in zip(batch.futures, batch.deadlines, strict=True):
            if future.done():
                continue
            if deadline <= now:
                future.set_exception(DeadlineError(f"{self._name} did not commit a record in time; it may do so yet"))
            else:
                next_one = min(next_one, deadline)
        if batch.expiry is not None:
            batch.expiry.cancel()
        if next_one < float("inf"):
            batch.expiry = loop.call_later(next_one - now, self._watch, loop, batch)


def _resolve(batch: _Batch[T], outcome: _Outcome) -> None:
    if batch.expiry is not None:
        batch.expiry.cancel()
    for index, future in enumerate(batch.futures):
        if future.done():
            continue
        failure = _failure(outcome, index) if outcome else None
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)


def _failure(outcome: _Outcome, index: int) -> Exception | None:
    if not isinstance(outcome, Exception):
        return outcome.get(index)
    failure = StorageError(f"not committed: {outcome}")
    failure.__cause__ = outcome
    return failure
