"""What engine adapters share of HTTP: calls with deadlines over one session per event loop, and streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Protocol

import aiohttp
import orjson

from storage.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Chunk
from workers.engines.http_stream import GATHER_S as GATHER_S
from workers.engines.http_stream import StreamBroken, StreamClient
from workers.engines.stream import SseDecoder, joined

IDLE_S = 2.0
"""How long a connection of a control call is used again: servers close theirs after 5 s, and a call that meets that
fails, since only those that change nothing are repeated."""
_JSON = {"Content-Type": "application/json"}


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
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),
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


class Reader(Protocol):
    """Turns the events of one generation into chunks."""

    request_id: str
    seen: int
    finished: bool

    def read_all(self, payloads: Sequence[bytes]) -> Iterator[Chunk]: ...


class HttpEngine:
    """Base of adapters for an engine at ``url``.

    Args:
        url: base URL, e.g. ``http://127.0.0.1:31000``.
        deadline_s: of one control call (pause, resume, abort, info, ...).
        load_deadline_s: of one weight update; whoever orders one has a limit of its own.
        stall_s: longest silence of a generation's stream, pauses included.
    """

    def __init__(
        self, url: str, *, deadline_s: float = 30.0, load_deadline_s: float = 3600.0, stall_s: float = 600.0
    ) -> None:
        self.url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._load_deadline_s = load_deadline_s
        self._http = SharedSession()
        self._streams = StreamClient(url, connect_s=deadline_s, silence_s=stall_s)

    async def close(self) -> None:
        """See :meth:`workers.engines.base.Engine.close`."""
        await self._streams.close()
        await self._http.close()

    async def _stream(
        self, path: str, body: bytes, reader: Reader, *, whole: bool = False
    ) -> AsyncGenerator[Chunk, None]:
        """POST and read events up to the final one; ``whole`` as of :class:`~workers.engines.base.Sampling`."""
        sse, connection = SseDecoder(), None
        try:
            connection = await self._streams.post(path, body, whole=whole)
            if connection.status != 200:
                raise self._refusal(path, connection.status, await connection.whole())
            while data := await connection.read():
                events = [payload for payload in sse.feed(data) if payload != b"[DONE]"]
                for chunk in joined(reader.read_all(events)):
                    yield chunk
                    if chunk.finish is not None:
                        return
            broken = "ended without a final event"
        except StreamBroken as error:
            broken = f"broke: {error}"
        finally:
            if connection is not None:
                connection.leave(satisfied=reader.finished)
        raise EngineUnavailable(
            f"{self.url}: the stream of request {reader.request_id} {broken}, after {reader.seen} tokens"
        )

    async def _post(self, path: str, body: dict[str, Any], *, deadline_s: float | None = None) -> Any:
        return await self._call("POST", path, orjson.dumps(body), deadline_s or self._deadline_s)

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path, None, self._deadline_s)

    async def _call(self, method: str, path: str, body: bytes | None, deadline_s: float) -> Any:
        """The answer's JSON; None if it is empty or plain text."""
        raw = await self._fetch(method, path, body, deadline_s)
        return _json(raw)

    async def _fetch(self, method: str, path: str, body: bytes | None, deadline_s: float) -> bytes:
        headers = _JSON if body is not None else {}
        try:
            async with asyncio.timeout(deadline_s):
                async with self._http.get().request(
                    method, f"{self.url}/{path}", data=body, headers=headers
                ) as response:
                    raw = await response.read()
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}: {path} gave no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}: {path}: {error!r}") from error
        if response.status != 200:
            raise self._refusal(path, response.status, raw)
        return raw

    def _refusal(self, path: str, status: int, raw: bytes) -> EngineError:
        message = f"{self.url}: {path} answered {status}: {_error_text(raw)}"
        if status == 404:
            return EngineProtocolError(message)
        return EngineRejected(message) if 400 <= status < 500 else EngineUnavailable(message)


def _json(raw: bytes) -> Any:
    """The body as JSON; None if it is empty or plain text, as some endpoints answer."""
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return None


def _error_text(raw: bytes) -> str:
    answer = _json(raw)
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)
    return raw[:300].decode(errors="replace")
