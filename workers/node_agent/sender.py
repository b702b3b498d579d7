"""Processes beside an engine that read published weights once and broadcast them to the engine's ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.ports import free_port
from workers.engines.base import Transfer
from workers.engines.sender import must_listen

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0


class Sender:
    """A process for each transfer, and the next one started ahead: it imports torch, for seconds in which the engine
    may as well work. One whose starter has gone ends by itself."""

    def __init__(self) -> None:
        self._ahead: Process | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Start a process that waits for its order."""
        if self._ahead is None or self._ahead.returncode is not None:
            command = (sys.executable, "-m", "workers.trainer.broadcast", "--wait")
            self._ahead = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL)

    @asynccontextmanager
    async def sending(self, weights: str, *, engine_ranks: int = 1, limit_s: float = 300.0) -> AsyncIterator[Transfer]:
        """A transfer of the checkpoint ``weights`` whose sender listens. What arrives is proved by the engine, so how
        the sender ends is only logged.

        Raises:
            EngineRejected: the sender does not come up; the engine has heard nothing of it.
        """
        transfer = Transfer(f"w-{uuid.uuid4().hex}", "127.0.0.1", free_port(), rank=1, world_size=1 + engine_ranks)
        words = ["--weights", weights, "--group", transfer.group, "--address", transfer.address]
        words += ["--port", str(transfer.port), "--world-size", str(transfer.world_size), "--timeout-s", str(limit_s)]
        await self.prepare()
        process, self._ahead = self._ahead, None
        assert process is not None  # noqa: S101 - just prepared
        assert process.stdin is not None  # noqa: S101 - a pipe
        process.stdin.write(shlex.join(words).encode() + b"\n")
        process.stdin.close()
        arrived = False
        try:
            await must_listen(transfer, START_LIMIT_S)
            yield transfer
            arrived = True
        finally:
            ending = asyncio.create_task(_end(process, weights, at_once=not arrived), name="end of a sender")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End what was started ahead, and wait for those that are ending."""
        if self._ahead is not None:
            await _end(self._ahead, "", at_once=True)
            self._ahead = None
        await asyncio.gather(*self._ending)


async def _end(process: Process, weights: str, *, at_once: bool) -> None:
    if not at_once:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await process.wait()
        if process.returncode != 0:
            log.warning("the sender of %s ended with %s after its weights had arrived", weights, process.returncode)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
