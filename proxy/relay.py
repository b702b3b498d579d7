"""Agents' requests that reached another proxy than their session's, byte by byte to the one that owns it.

When the owner of a session dies, or loses its lease, whoever has it then goes on with the answers that it had begun:
their clients see one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import aiohttp

from proxy.app import AgentApp
from proxy.asgi import GONE, App, Message, Receive, Scope, Send, read_body, reply
from proxy.control import control_app
from proxy.dialects.fields import openai_error
from proxy.peers import LEASE_S, PASSED_ON, RENEW_S, TOLD, TURN, Elsewhere, Peers
from proxy.service import Service
from storage.errors import DeadlineError, SeamlessFlowError

MISDIRECTED = 421
PAUSE_S = 0.2
LIMIT_S = 3 * LEASE_S
"""How long a session may be without an owner that answers."""

_PASSED_ON, _TOLD, _TURN = PASSED_ON.encode(), TOLD.encode(), TURN.encode()
_KEEP_ALIVE = (b":", b"event: ping\n")
"""How an event of a stream begins that says nothing, in any dialect."""
_RETRY = b"x-stainless-retry-count"
_HOP = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"date", b"server"),
}
"""Headers of one connection, and those that this server and client write themselves."""

_log = logging.getLogger(__name__)


class _Telling:
    """Sends one answer that comes from one owner after the other: its head once, and of a stream whole events."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send
        self._told = 0
        self._turn: bytes | None = None  # of a stream
        self._part = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._turn is not None:
            await self._events(message)
        else:
            self._told += len(message.get("body", b"").strip())
            await self._send(message)

    @property
    def position(self) -> bytes | None:
        """Where the stream stands, if it has begun."""
        return None if self._turn is None else b"%b %d" % (self._turn, self._told)

    async def _start(self, message: Message) -> None:
        self._part = b""
        if not self.begun:
            self.begun = True
            self._turn = dict(message["headers"]).get(_TURN)
            await self._send(message)
        elif message["status"] != 200 or (self._told and self._turn is None):
            raise ConnectionError("an answer that was begun cannot be gone on with")

    async def _events(self, message: Message) -> None:
        whole, separator, self._part = (self._part + message.get("body", b"")).rpartition(b"\n\n")
        events = whole.split(b"\n\n") if separator else []
        self._told += sum(len(event) + len(separator) for event in events if not event.startswith(_KEEP_ALIVE))
        if events or not message.get("more_body"):
            await self._send({**message, "body": whole + separator})


class Relay:
    """In front of ``app``, whose Elsewhere it catches. While an owner does not answer, ``app`` is asked again.

    A request that an owner may have begun before it died is repeated as the retry that it is.
    """

    def __init__(self, app: App, peers: Peers) -> None:
        self._app = app
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = _Telling(send)
        try:
            await self._serve(scope, receive, telling)
        except SeamlessFlowError as error:
            status, body = openai_error(error)
            await reply(telling, status, [(b"content-type", b"application/json")], body)

    async def _serve(self, scope: Scope, receive: Receive, send: _Telling) -> None:
        deadline = time.monotonic() + LIMIT_S
        read: list[Message] = []
        while True:
            try:
                await self._app(scope, _again(read, receive), send)
                return
            except Elsewhere as elsewhere:
                where = elsewhere
            if any(name == _PASSED_ON for name, _ in scope["headers"]) and not send.begun:
                await reply(send, MISDIRECTED, [], b"" if where.hold_s is None else b"%g" % where.hold_s)
                return
            if (body := await read_body(_again(read, receive))) is None:
                return
            asked = time.monotonic()
            try:
                if where.url and await self._forward(where.url, scope, body, send):
                    return
            except Elsewhere as elsewhere:
                where = elsewhere
            deadline += time.monotonic() - asked  # as long as it had an owner
            if where.hold_s is not None:
                deadline = max(deadline, time.monotonic() + where.hold_s)
                _make_retry(scope, send.position)
            if time.monotonic() > deadline:
                url = where.url
                owner = f"the proxy at {url}, which owns this session," if url else "the proxy that owns this session"
                raise DeadlineError(f"{owner} gave no answer within {LIMIT_S:g} s")
            await asyncio.sleep(PAUSE_S)

    async def _forward(self, url: str, scope: Scope, body: bytes, send: _Telling) -> bool:
        """Pass a request on until its client or the owner goes away; False: it has no whole answer yet, ask again."""
        gone: asyncio.Future[None] = scope[GONE]
        passing = asyncio.create_task(self._pass(url, scope, body, send))
        either: set[asyncio.Future[Any]] = {gone, passing}
        try:
            while not (passing.done() or gone.done()):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=2 * RENEW_S)
                if not self._peers.lives(url):  # it may stand still and keep its connections
                    break
            if passing.done():
                return await passing
            _make_retry(scope, send.position)
            return gone.done()
        finally:
            passing.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError, Elsewhere):
                await passing

    async def _pass(self, url: str, scope: Scope, body: bytes, send: _Telling) -> bool:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        target = url + (scope["raw_path"] + query).decode("latin-1")
        headers = [(name, value) for name, value in scope["headers"] if name not in (*_HOP, _PASSED_ON)]
        headers.append((_PASSED_ON, self._peers.id.encode()))
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        try:
            async with self._peers.http().request(scope["method"], target, headers=sent, data=body) as answer:
                if answer.status == MISDIRECTED:
                    if held := await answer.read():  # it had begun, and lost the session
                        raise Elsewhere("", hold_s=float(held))
                    return False
                got = [(name.lower(), value) for name, value in answer.raw_headers]
                kept = [(name, value) for name, value in got if name not in _HOP or name == b"content-length"]
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for data in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return True
        except aiohttp.ClientError as error:
            _log.info("proxy at %s: %s", url, error)
            if not isinstance(error, aiohttp.ClientConnectorError):
                _make_retry(scope, send.position)
            return False


def application(service: Service, control_key: str) -> App:
    """The whole HTTP side of one proxy process."""
    app = AgentApp(service.sessions, control_app(service, control_key))
    return app if service.peers is None else Relay(app, service.peers)


def _again(read: list[Message], receive: Receive) -> Receive:
    """What ``receive`` would give if nothing had been ``read`` from it; what is read now is noted there."""
    left = list(read)

    async def replayed() -> Message:
        if left:
            return left.pop(0)
        message = await receive()
        read.append(message)
        return message

    return replayed


def _make_retry(scope: Scope, position: bytes | None) -> None:
    """The owner may have begun an answer: whoever goes on with the session shall find it, and go on from there."""
    retries = dict(scope["headers"]).get(_RETRY, b"0")
    headers = [(name, value) for name, value in scope["headers"] if name not in (_RETRY, _TOLD)]
    headers.append((_RETRY, b"1" if retries == b"0" else retries))
    scope["headers"] = headers if position is None else [*headers, (_TOLD, position)]
