"""Agents' requests that reached another proxy than their session's, byte by byte to the one that owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import aiohttp

from proxy.app import AgentApp
from proxy.asgi import App, Message, Receive, Scope, Send, disconnected, read_body, reply
from proxy.control import control_app
from proxy.dialects.fields import openai_error
from proxy.peers import LEASE_S, PASSED_ON, RENEW_S, Elsewhere, Peers
from proxy.service import Service
from storage.errors import DeadlineError, SeamlessFlowError

MISDIRECTED = 421
PAUSE_S = 0.2
LIMIT_S = 3 * LEASE_S
"""How long a session may be without an owner that answers."""

_PASSED_ON = PASSED_ON.encode()
_RETRY = b"x-stainless-retry-count"
_HOP = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"date", b"server"),
}
"""Headers of one connection, and those that this server and client write themselves."""

_log = logging.getLogger(__name__)


class Relay:
    """In front of ``app``, whose Elsewhere it catches. While an owner does not answer, ``app`` is asked again.

    A request that an owner may have begun before it died is repeated as the retry that it is.
    """

    def __init__(self, app: App, peers: Peers) -> None:
        self._app = app
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except SeamlessFlowError as error:
            status, body = openai_error(error)
            await reply(send, status, [(b"content-type", b"application/json")], body)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = time.monotonic() + LIMIT_S
        body: bytes | None = None
        while True:
            try:
                await self._app(scope, receive if body is None else _again(body, receive), send)
                return
            except Elsewhere as elsewhere:
                url = elsewhere.url
            if any(name == _PASSED_ON for name, _ in scope["headers"]):
                await reply(send, MISDIRECTED, [], b"")
                return
            body = await read_body(receive) if body is None else body
            if body is None:
                return
            if url and await self._forward(url, scope, body, receive, send):
                return
            if time.monotonic() > deadline:
                owner = f"the proxy at {url}, which owns this session," if url else "the proxy that owns this session"
                raise DeadlineError(f"{owner} gave no answer within {LIMIT_S:g} s")
            await asyncio.sleep(PAUSE_S)

    async def _forward(self, url: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Pass a request on until its client or the owner goes away; False: it has no answer yet, ask again."""
        begun = asyncio.Event()
        gone = asyncio.create_task(disconnected(receive))
        passing = asyncio.create_task(self._pass(url, scope, body, send, begun))
        try:
            while not (passing.done() or gone.done()):
                await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED, timeout=2 * RENEW_S)
                if not self._peers.lives(url):  # it may stand still and keep its connections
                    break
            if passing.done():
                return await passing
            if begun.is_set() and not gone.done():
                raise ConnectionError(f"the proxy at {url} died while it answered")
            _make_retry(scope)
            return gone.done()
        finally:
            for task in (gone, passing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                    await task

    async def _pass(self, url: str, scope: Scope, body: bytes, send: Send, begun: asyncio.Event) -> bool:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        target = url + (scope["raw_path"] + query).decode("latin-1")
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        headers.append((_PASSED_ON, self._peers.id.encode()))
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        try:
            async with self._peers.http().request(scope["method"], target, headers=sent, data=body) as answer:
                if answer.status == MISDIRECTED:
                    return False
                got = [(name.lower(), value) for name, value in answer.raw_headers]
                kept = [(name, value) for name, value in got if name not in _HOP or name == b"content-length"]
                begun.set()
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for data in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return True
        except aiohttp.ClientError as error:
            if begun.is_set():
                raise  # the server breaks the client's connection off, which says the same
            _log.info("proxy at %s: %s", url, error)
            if not isinstance(error, aiohttp.ClientConnectorError):
                _make_retry(scope)
            return False


def application(service: Service, control_key: str) -> App:
    """The whole HTTP side of one proxy process."""
    app = AgentApp(service.sessions, control_app(service, control_key))
    return app if service.peers is None else Relay(app, service.peers)


def _again(body: bytes, receive: Receive) -> Receive:
    """What ``receive`` would give if the body had not been read from it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _make_retry(scope: Scope) -> None:
    """The owner may have begun an answer: whoever goes on with the session shall find it."""
    headers = dict(scope["headers"])
    if headers.get(_RETRY, b"0") == b"0":
        scope["headers"] = [*((name, value) for name, value in scope["headers"] if name != _RETRY), (_RETRY, b"1")]
