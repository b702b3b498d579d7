"""The load generator: HTTP/1.1 over asyncio with as little work per event as there can be, and a clock."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

_SPOKE = re.compile(rb'"content":\s*"[^"]')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, with seconds since the request was sent until its first text and until its end."""

    status: int
    first_s: float
    total_s: float
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return orjson.loads(self.body)

    def text(self) -> str:
        """What the agent reads. Raises ValueError if it is no whole answer."""
        if self.status != 200:
            raise ValueError(f"status {self.status}: {self.body[:300]!r}")
        if not self.body.startswith(b"data:"):
            return str(orjson.loads(self.body)["choices"][0]["message"]["content"])
        *events, end = [line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:")]
        if end != b"[DONE]":
            raise ValueError(f"the stream ends with {end[:200]!r}")
        deltas = [choice["delta"] for event in events for choice in orjson.loads(event).get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[Reply] | None = None

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            cls, str(parts.hostname), int(parts.port or 80)
        )
        return connection

    async def send(self, request: bytes) -> Reply:
        """Send and wait for the whole answer; raises ConnectionError, TimeoutError."""
        self._done = asyncio.get_running_loop().create_future()
        self._data = bytearray()
        self._body_at = 0
        self._needed: int | None = None
        self._first = 0.0
        self._started = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(_LIMIT_S):
            return await self._done

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionResetError(f"cut after {bytes(self._data[-200:])!r}"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._body_at and not self._head():
            return
        if not self._first and _SPOKE.search(self._data, self._body_at):
            self._first = time.perf_counter()
        chunked = self._needed is None
        if self._data.endswith(b"0\r\n\r\n") if chunked else len(self._data) >= cast(int, self._needed):
            self._finish(chunked)

    def _head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._body_at = end + 4
        length = _LENGTH.search(self._data, 0, end)
        self._needed = None if length is None else self._body_at + int(length.group(1))
        return True

    def _finish(self, chunked: bool) -> None:
        now = time.perf_counter()
        data = bytes(self._data)
        body = _unchunked(data, self._body_at) if chunked else data[self._body_at :]
        done = cast("asyncio.Future[Reply]", self._done)
        if not done.done():
            first = (self._first or now) - self._started
            done.set_result(Reply(int(data[9:12]), first, now - self._started, body))


def post(url: str, path: str, body: bytes, key: str = "none") -> bytes:
    """The bytes of one request, with the headers that an SDK sends."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAccept: application/json\r\n"
        f"Content-Type: application/json\r\nUser-Agent: agent/1.0\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def call(url: str, path: str, body: dict[str, Any] | None = None) -> Reply:
    """One request on its own connection: GET without a body."""
    connection = await Connection.open(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode()
    try:
        return await connection.send(request if body is None else post(url, path, orjson.dumps(body)))
    finally:
        connection.close()


async def drive(url: str, sessions: Iterable[Sequence[bytes]], concurrency: int) -> tuple[list[Reply], float]:
    """Send every session's requests in order, ``concurrency`` sessions at a time; returns replies and seconds."""
    waiting = deque(sessions)
    replies: list[Reply] = []
    connections = [await Connection.open(url) for _ in range(min(concurrency, len(waiting)))]

    async def client(connection: Connection) -> None:
        while waiting:
            for request in waiting.popleft():
                replies.append(await connection.send(request))

    started = time.perf_counter()
    try:
        await asyncio.gather(*(client(connection) for connection in connections))
    finally:
        for connection in connections:
            connection.close()
    return replies, time.perf_counter() - started


def _unchunked(data: bytes, at: int) -> bytes:
    parts: list[bytes] = []
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + size + 4
