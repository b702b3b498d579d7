"""One HTTP connection pool per process (strictly: per event loop), shared by all engine adapters."""

from __future__ import annotations

import asyncio

import aiohttp


class SharedSession:
    """A user's handle on the event loop's shared :class:`aiohttp.ClientSession`.

    The session is opened by its first user and closed by its last.
    """

    _sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, set[int]]] = {}  # noqa: RUF012 - shared on purpose

    def get(self) -> aiohttp.ClientSession:
        """The session of the running event loop."""
        loop = asyncio.get_running_loop()
        entry = self._sessions.get(loop)
        if entry is None:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
            entry = self._sessions[loop] = (session, set())
        entry[1].add(id(self))
        return entry[0]

    async def close(self) -> None:
        """Give the handle back; safe to call twice."""
        loop = asyncio.get_running_loop()
        entry = self._sessions.get(loop)
        if entry is None:
            return
        session, users = entry
        users.discard(id(self))
        if not users:
            del self._sessions[loop]
            await session.close()
