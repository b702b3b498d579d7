"""A process beside an engine that reads published weights once and broadcasts them to the engine's ranks."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.ports import free_port
from workers.engines.base import Transfer
from workers.engines.sender import must_listen

START_LIMIT_S = 60.0


class Sender:
    """One process for all transfers: it imports torch, which takes seconds, before the first. It ends with whoever
    started it, or with the first transfer that fails; the next one starts another."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def prepare(self) -> Process:
        """Have a process that waits for its orders."""
        if self._process is None or self._process.returncode is not None:
            command = (sys.executable, "-m", "workers.trainer.broadcast", "--serve")
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL)
        return self._process

    @asynccontextmanager
    async def sending(self, weights: str, *, engine_ranks: int = 1, limit_s: float = 300.0) -> AsyncIterator[Transfer]:
        """A transfer of the checkpoint ``weights`` whose sender listens. What arrives is proved by the engine.

        Raises:
            EngineRejected: the sender does not come up; the engine has heard nothing of it.
        """
        transfer = Transfer(f"w-{uuid.uuid4().hex}", "127.0.0.1", free_port(), rank=1, world_size=1 + engine_ranks)
        words = ["--weights", weights, "--group", transfer.group, "--address", transfer.address]
        words += ["--port", str(transfer.port), "--world-size", str(transfer.world_size), "--timeout-s", str(limit_s)]
        process = await self.prepare()
        assert process.stdin is not None  # noqa: S101 - a pipe
        process.stdin.write(shlex.join(words).encode() + b"\n")
        try:
            await must_listen(transfer, START_LIMIT_S)
            yield transfer
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
