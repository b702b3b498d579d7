"""One request to one engine: read by its own task, taken in batches, interruptible."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from storage.errors import EngineError
from workers.engines.base import Chunk, Engine, Sampling, TokenIds

DRAIN_S = 1.0
"""How long an interrupted engine has to hand over its last tokens before the connection is dropped."""

_log = logging.getLogger(__name__)


class Upstream:
    """Chunks that arrive while the previous ones are being journalled are taken together in the next batch."""

    def __init__(self, engine: Engine, ids: TokenIds, sampling: Sampling, *, request_id: str, salt: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._inbox: list[Chunk] = []
        self._arrived = asyncio.Event()
        self._error: EngineError | None = None
        self._ended = False
        self._interruption: asyncio.Task[None] | None = None
        self._reader = asyncio.create_task(self._read(ids, sampling, salt), name=f"read {request_id}")

    @property
    def interrupted(self) -> bool:
        """Whether we ended it, not the engine."""
        return self._interruption is not None

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """All chunks, in order; raises the engine's error after the last one, unless we interrupted it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._inbox = self._inbox, []
            if batch:
                yield batch
            elif self._ended:
                break
            if self._ended:
                self._arrived.set()
        if self._error is not None and not self.interrupted:
            raise self._error

    def interrupt(self) -> None:
        """Abort on the engine by request id; tokens that still come within :data:`DRAIN_S` are kept."""
        if self._interruption is None and not self._ended:
            self._interruption = asyncio.create_task(self._interrupt(), name=f"interrupt {self._request_id}")

    async def close(self) -> None:
        """Drop the connection, which aborts the request if it still runs."""
        if self._interruption is not None:
            await asyncio.wait({self._interruption}, timeout=2 * DRAIN_S)
            self._interruption.cancel()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self, ids: TokenIds, sampling: Sampling, salt: str) -> None:
        try:
            async with contextlib.aclosing(
                self._engine.generate(ids, sampling, request_id=self._request_id, salt=salt)
            ) as chunks:
                async for chunk in chunks:
                    self._inbox.append(chunk)
                    self._arrived.set()
        except EngineError as error:
            self._error = error
        finally:
            self._ended = True
            self._arrived.set()

    async def _interrupt(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._engine.abort(self._request_id)
        except (EngineError, TimeoutError) as error:
            # The engine may be gone; dropping the connection below aborts the request if it is not.
            _log.info("abort of %s: %s", self._request_id, error)
        await asyncio.wait({self._reader}, timeout=DRAIN_S)
        self._reader.cancel()
