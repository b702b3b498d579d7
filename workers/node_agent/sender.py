"""A process beside an engine that reads published weights once and broadcasts them to the engine's ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.ports import free_port
from workers.engines.base import Transfer

log = logging.getLogger(__name__)

END_LIMIT_S = 10.0


@asynccontextmanager
async def sending(weights: str, *, engine_ranks: int = 1, limit_s: float = 300.0) -> AsyncIterator[Transfer]:
    """A transfer of the checkpoint ``weights`` whose sender is starting; it ends with the block.

    What arrived is proved by the engine, so how the sender ends is only logged.
    """
    transfer = Transfer(f"w-{uuid.uuid4().hex}", "127.0.0.1", free_port(), rank=1, world_size=1 + engine_ranks)
    words = ["--weights", weights, "--group", transfer.group, "--address", transfer.address]
    words += ["--port", str(transfer.port), "--world-size", str(transfer.world_size), "--timeout-s", str(limit_s)]
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.trainer.broadcast", *words),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        yield transfer
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await sender.wait()
        if sender.returncode != 0:
            log.warning("the sender of %s ended with %s after its weights had arrived", weights, sender.returncode)
    finally:
        if sender.returncode is None:
            sender.kill()
            await sender.wait()
