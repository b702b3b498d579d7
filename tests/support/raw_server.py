"""A server that reads requests and otherwise does what a test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Peer:
    """One connection, from the server's side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> bytes:
        """The body of the next request; raises IncompleteReadError if the client is gone."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await self.reader.readexactly(int(length.split(b":")[1]))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Peer], Awaitable[None]]


@dataclass
class RawServer:
    """Serves each connection with the next of ``behaviours``, the last one for ever."""

    behaviours: tuple[Behaviour, ...]
    url: str = ""
    connections: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behaviour = self.behaviours[min(self.connections, len(self.behaviours) - 1)]
        self.connections += 1
        peer = Peer(reader, writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await behaviour(peer)
            writer.close()
        finally:
            if not writer.is_closing():
                peer.reset()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def raw_server(*behaviours: Behaviour) -> AsyncIterator[RawServer]:
    """A server on a free loopback port. What it does to a connection ends when its behaviour returns."""
    served = RawServer(behaviours)

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(served.serve(reader, writer))
        served.tasks.add(task)
        task.add_done_callback(served.tasks.discard)

    server = await asyncio.start_server(start, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for task in served.tasks:
            task.cancel()
        await asyncio.gather(*served.tasks, return_exceptions=True)
