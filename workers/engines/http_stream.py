"""Streamed POSTs to one engine: HTTP/1.1 over kept connections, read at a pace of ours.

An engine sends a piece for every token. To read each as it comes would wake the event loop, the journal and the agent
for every token, so the socket rests between reads (:data:`PACE`) and what came meanwhile is taken together.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast
from urllib.parse import urlsplit

from storage.errors import ConfigError, EngineUnavailable
from workers.engines.http_answer import Answer

GATHER_S = 0.02
PACE: Final = ((GATHER_S, 0.005, GATHER_S), (0.2, GATHER_S, GATHER_S), (float("inf"), 0.05, 0.05))
"""(up to this age of the stream, the socket rests so long, data is handed over after so long), in seconds: the end of a
short answer is seen soon, that of a long one late by a small part of what it took."""
WHOLE_GAP_S: Final = 0.1
"""Data of an answer that nobody reads before its end is handed over after so long, the first too."""
_REFUSAL = 64 * 2**10
"""What is read of an answer that says why not."""
_IDLE_S = 2.0
"""A connection without a request is kept so long: less than the 5 s after which servers close it."""
_DRAIN_S = 1.0
"""The end of an answer that has said all has so long to come, or its connection is given up."""
_TICK_S = 0.001  # the resolution of an event loop's clock


class StreamBroken(EngineUnavailable):
    """The exchange failed; says how. The pieces before were handed over."""


class StreamClient:
    """Connections to the engine at ``url``, of one event loop.

    Args:
        url: base URL.
        connect_s: deadline of a new connection.
        silence_s: longest time without a byte from the engine while one is waited for.
    """

    def __init__(self, url: str, *, connect_s: float, silence_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ConfigError(f"{url!r} is no URL of an engine, as http://host:port is")
        self._tls = True if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._head = f"POST {parts.path.rstrip('/')}/%s HTTP/1.1\r\nHost: {parts.netloc}\r\n" + (
            "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, *, whole: bool = False) -> Connection:
        """Send JSON; returns when the first piece of the answer's body is there, or its end, soon if it is ``whole``.

        A kept connection that turns out to be closed, with nothing said, is replaced once. Raises StreamBroken.
        """
        head = (self._head % (path, len(body))).encode()
        if self._idle:
            connection = self._idle.pop()
            try:
                return await connection.exchange(head, body, whole)
            except StreamBroken:
                if not connection.was_closed:
                    raise
        return await (await self._connect()).exchange(head, body, whole)

    async def close(self) -> None:
        """Close every connection, also those in use."""
        await asyncio.gather(*[connection.abort("closed here") for connection in self._open])

    def hurry(self) -> None:
        """The answers under way are about to end: no socket rests any more before that."""
        for connection in list(self._open):
            connection.hurry()

    def keep(self, connection: Connection) -> None:
        """It can carry another request."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop, self._silence_s), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise StreamBroken(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise StreamBroken(f"no connection: {error}") from error
        self._open.add(connection)
        return connection


class Connection(asyncio.Protocol):
    """Carries one request after the other; its user reads the answer and then :meth:`leave`\\ s, once."""

    was_closed = False
    """By the engine, before a byte of the answer."""

    def __init__(self, client: StreamClient, loop: asyncio.AbstractEventLoop, silence_s: float) -> None:
        self._client = client
        self._loop = loop
        self._silence_s = silence_s
        self._gone = loop.create_future()
        self._answer = Answer()
        self._busy = False  # with a request, from its first byte until its answer is left
        self._left = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # ends a rest of the socket, a drain or idleness
        self._watch: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._first = 0.0  # when the first piece was handed over
        self._due = 0.0  # when the next may be
        self._rest_s = self._least_gap_s = 0.0
        self._hurries = False

    @property
    def status(self) -> int:
        """Of the answer."""
        return self._answer.status

    async def exchange(self, head: bytes, body: bytes, whole: bool) -> Connection:
        """Send a request and wait for the first of its answer's body. Raises StreamBroken."""
        self._answer = Answer()
        self._busy, self._left, self._hurries = True, False, False
        self._first, self._rest_s = 0.0, PACE[0][1]
        self._least_gap_s = WHOLE_GAP_S if whole else 0.0
        self._due = self._loop.time() + WHOLE_GAP_S if whole else 0.0
        self._cancel_timer()
        self._watch = self._loop.call_later(self._silence_s, self._check_silence)
        if not self._transport.is_closing():
            self._transport.writelines((head, body))
        else:
            self.connection_lost(None)
        try:
            await self._until_ripe()
        except asyncio.CancelledError:
            self.leave()
            raise
        if self._answer.fault and not self._answer.pieces:
            raise StreamBroken(self._answer.fault)
        return self

    async def read(self) -> bytes:
        """The body since the last call, at the pace; empty at its end. Raises StreamBroken."""
        await self._until_ripe()
        answer = self._answer
        data = b"".join(answer.pieces)
        answer.pieces.clear()
        if answer.fault and not data:
            raise StreamBroken(answer.fault)
        if not answer.complete and not answer.fault:
            now = self._loop.time()
            self._first = self._first or now
            self._rest_s, gap = next((rest, gap) for age, rest, gap in PACE if now - self._first < age)
            self._due = now + max(gap, self._least_gap_s)
            if self._hurries:
                self._rest_s, self._due = 0.0, now
            self._rest(self._rest_s)
        return data

    async def whole(self) -> bytes:
        """The rest of the body, cut after 64 KiB. Raises StreamBroken."""
        data = b""
        while len(data) < _REFUSAL and (more := await self.read()):
            data += more
        return data[:_REFUSAL]

    def leave(self, *, satisfied: bool = False) -> None:
        """Read no more. The connection is kept if the answer is at its end, or if only that is missing and comes soon
        (``satisfied``); it is closed if not, which tells the engine to stop."""
        self._left = True
        if self._answer.complete:
            self._finish()
        elif satisfied:
            self._cancel_timer()
            self._timer = self._loop.call_later(_DRAIN_S, self.abort, "the end of the answer did not come")
            self._transport.resume_reading()
        else:
            self.abort("left by its reader")

    def hurry(self) -> None:
        """From here to its end the answer is read as it comes."""
        if self._busy and not self._left:
            self._hurries = True
            self._rest_s = self._due = 0.0
            if self._waiter is not None:
                self._cancel_timer()
                self._rested()

    def abort(self, why: str) -> asyncio.Future[None]:
        """Close at once; the future is done when that has happened."""
        self._answer.fail(why)
        self._cancel_timer()
        self._wake()
        self._transport.abort()
        return self._gone

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if not self._busy:
            self.abort("data that nothing asked for")
            return
        self._heard = self._loop.time()
        answer.feed(data)
        if answer.fault:
            self.abort(answer.fault)
        elif self._left:
            answer.pieces.clear()
            if answer.complete:
                self._finish()
        elif answer.complete:
            self._cancel_timer()
            self._wake()
        elif answer.pieces:
            if self._ripe():
                self._rest(None)
                self._wake()
            else:
                self._rest(min(self._rest_s, self._due - self._heard))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.forget(self)
        self._cancel_timer()
        if self._watch is not None:
            self._watch.cancel()
        if self._busy and self._answer.unheard and not self._answer.fault:
            self.was_closed = True
        self._answer.end("" if exc is None else f" ({exc})")
        self._wake()
        if not self._gone.done():
            self._gone.set_result(None)

    # Pace

    def _ripe(self) -> bool:
        """Whether the reader may go on."""
        answer = self._answer
        if answer.complete or answer.fault:
            return True
        return bool(answer.pieces) and self._loop.time() >= self._due - _TICK_S

    async def _until_ripe(self) -> None:
        if self._ripe():
            return
        self._heard = self._loop.time()
        self._waiter = self._loop.create_future()
        if self._timer is None:
            self._rested()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _rest(self, seconds: float | None) -> None:
        """The socket is not read for so long; None: until the reader comes back."""
        self._cancel_timer()
        self._transport.pause_reading()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._ripe():
            self._wake()
            return
        self._transport.resume_reading()
        if self._answer.pieces:
            self._timer = self._loop.call_later(self._due - self._loop.time(), self._rested)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_silence(self) -> None:
        """Time counts while the reader waits, from the last byte."""
        now = self._loop.time()
        left = self._silence_s - (now - self._heard if self._waiter is not None else 0.0)
        if left > _TICK_S:
            self._watch = self._loop.call_later(left, self._check_silence)
        else:
            self.abort(f"stalled: nothing for {self._silence_s:g} s")

    def _finish(self) -> None:
        """The answer has ended and is read: keep the connection, if it can be."""
        self._cancel_timer()
        if self._watch is not None:
            self._watch.cancel()
        self._busy = False
        if self._answer.reusable and not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._transport.resume_reading()
            self._timer = self._loop.call_later(_IDLE_S, self.abort, "idle")
            self._client.keep(self)
        else:
            self.abort("not to be used again")
