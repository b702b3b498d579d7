"""The other end of a :class:`~workers.engines.base.Transfer`, seen from an adapter."""

from __future__ import annotations

import asyncio

from storage.errors import EngineRejected
from workers.engines.base import Transfer


async def must_listen(transfer: Transfer, limit_s: float) -> None:
    """Returns when the sender can be reached; raises :class:`EngineRejected` if it cannot within ``limit_s``."""
    end = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            _, writer = await asyncio.open_connection(transfer.address, transfer.port)
        except OSError as error:
            if asyncio.get_running_loop().time() > end:
                raise EngineRejected(
                    f"the sender at {transfer.address}:{transfer.port} is not there: {error}"
                ) from None
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
