"""One request to one engine: read chunk by chunk, interruptible."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from storage.errors import EngineError
from workers.engines.base import Chunk, Engine, Sampling, TokenIds

DRAIN_S = 1.0
"""How long an interrupted engine has to hand over its last tokens before the connection is dropped."""
MISSED_S = 0.25
"""How long a request may outlive an abort of all before it is aborted by its id: it was not there yet."""

_log = logging.getLogger(__name__)


class Upstream:
    """Read by one task; whoever interrupts it may be another. To be closed."""

    def __init__(self, engine: Engine, ids: TokenIds, sampling: Sampling, *, request_id: str, salt: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._chunks = engine.generate(ids, sampling, request_id=request_id, salt=salt)
        self._reading: asyncio.Timeout | None = None  # while the reader waits; expires when the connection is dropped
        self._over = asyncio.Event()
        self._interruption: asyncio.Task[None] | None = None

    async def read(self) -> Chunk | None:
        """The next chunk; None: there is none. Raises the engine's error, unless we interrupted it."""
        if self._over.is_set():
            return None
        try:
            async with asyncio.timeout(None) as self._reading:
                return await anext(self._chunks)
        except (StopAsyncIteration, TimeoutError):
            self._over.set()
        except BaseException as error:
            self._over.set()
            if not isinstance(error, EngineError) or self._interruption is None:
                raise
        finally:
            self._reading = None
        return None

    def interrupt(self, all_aborted: asyncio.Future[None] | None = None) -> None:
        """Abort on the engine by request id; tokens that still come within :data:`DRAIN_S` are kept.

        ``all_aborted``: done when whoever interrupts has had the engine abort all it has, this request among it.
        """
        if self._interruption is None and not self._over.is_set():
            self._interruption = asyncio.create_task(self._interrupt(all_aborted), name=f"interrupt {self._request_id}")

    async def close(self) -> None:
        """Drop the connection, which aborts the request if it still runs."""
        if self._interruption is not None:
            while await self.read() is not None:
                pass
            await self._interruption
        await self._chunks.aclose()

    async def _interrupt(self, all_aborted: asyncio.Future[None] | None) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                if all_aborted is None or not await self._ended_with(all_aborted):
                    await self._engine.abort(self._request_id)
        except (EngineError, TimeoutError) as error:
            # The engine may be gone; dropping the connection below aborts the request if it is not.
            _log.info("abort of %s: %s", self._request_id, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._over.wait()
        self._over.set()
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def _ended_with(self, all_aborted: asyncio.Future[None]) -> bool:
        await asyncio.wait({all_aborted})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MISSED_S):
                await self._over.wait()
        return self._over.is_set()
