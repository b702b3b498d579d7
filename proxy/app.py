"""The agent API as a bare ASGI application: one request in, one recorded turn out.

Written against ASGI because this path bounds the proxy's CPU per token. All
other paths go to the control API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import orjson

from proxy.dialects.base import AnswerHead, AnswerTail, Dialect, TokenInfo, TurnRequest
from proxy.dialects.chat import ChatDialect
from proxy.generation import Generation
from proxy.sessions import LiveSession, Sessions
from storage.errors import AuthenticationFailed, InvalidRequest, NotFoundError, SeamlessFlowError, SessionClosed

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say for so long gets a comment."""
MAX_BODY = 64 * 1024 * 1024
"""Longest request body in bytes."""

DIALECTS: dict[str, Dialect] = {"/chat/completions": ChatDialect()}
"""Path below ``/v1`` -> what is spoken there."""

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_FINAL = (b"x-should-retry", b"false")
"""SDKs repeat 408, 409, 429 and 5xx unless told not to; our errors are final."""

_log = logging.getLogger(__name__)


class AgentApp:
    """Serves ``/v1/...`` and ``/s/<session>/v1/...``; hands everything else to ``control``."""

    def __init__(self, sessions: Sessions, control: App) -> None:
        self._sessions = sessions
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(("/v1/", "/s/")):
            await self._control(scope, receive, send)
            return
        session, endpoint = _split(path)
        dialect = DIALECTS.get(endpoint, DIALECTS["/chat/completions"])
        try:
            await self._serve(scope, receive, send, session, endpoint, dialect)
        except SeamlessFlowError as error:
            await _reply_error(send, dialect, error)
        except Exception as error:  # noqa: BLE001  # a defect of ours gets the dialect's error shape, and the log
            _log.exception("%s %s", scope["method"], path)
            await _reply_error(send, dialect, RuntimeError(f"internal error: {type(error).__name__}"))

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, session: str | None, endpoint: str, dialect: Dialect
    ) -> None:
        headers = _headers(scope)
        live = await self._sessions.authenticate(session, _key(headers))
        if endpoint == "/models" and scope["method"] == "GET":
            await _reply(send, 200, [_JSON], _models(live))
            return
        if endpoint not in DIALECTS:
            raise NotFoundError(f"{scope['path']} is not served here: only {', '.join('/v1' + p for p in DIALECTS)}")
        if scope["method"] != "POST":
            raise InvalidRequest(f"{scope['method']} {scope['path']}: only POST is allowed")
        body = await _body(receive)
        if body is None:
            return
        request = dialect.parse(body)
        generation = await live.request(
            request,
            body,
            retried=_retries(headers) > 0,
            idempotency_key=headers.get(b"idempotency-key", b"").decode("latin-1"),
        )
        gone = asyncio.create_task(_disconnected(receive))
        answer = _Answer(live, request, generation, dialect, send)
        writing = asyncio.create_task(answer.stream() if request.stream else answer.whole())
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
        finally:
            generation.detach()
            for task in (writing, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, SeamlessFlowError):
                    await task


class _Answer:
    """One reader of a generation, writing to one client."""

    def __init__(
        self, live: LiveSession, request: TurnRequest, generation: Generation, dialect: Dialect, send: Send
    ) -> None:
        self._request = request
        self._generation = generation
        self._dialect = dialect
        self._send = send
        self._renderer = live.session.renderer
        turn = generation.turn
        self._head = AnswerHead(turn.generation, turn.created, live.session.policy.model)
        self._told = 0

    async def whole(self) -> None:
        generation = self._generation
        while not generation.done:
            await generation.news(len(generation.deltas))
        self._raise_failure()
        turn = generation.turn
        assert turn.answer is not None, "a finished turn has its answer"  # noqa: S101  # for the type checker
        tokens = self._tokens(len(turn.recording.ids)) if self._request.logprobs else None
        await _reply(self._send, 200, [_JSON], self._dialect.answer(self._head, self._tail(), turn.answer, tokens))

    async def stream(self) -> None:
        """Headers wait for the first delta, so that an early failure gets its status; keep-alives may force them."""
        generation, writer = self._generation, self._dialect.stream(self._head, self._request)
        seen, started = 0, False
        while not (generation.done and seen == len(generation.deltas)):
            if not await generation.news(seen, KEEP_ALIVE_S):
                data = self._dialect.keep_alive
            elif generation.done and not started and self._failed():
                self._raise_failure()
                return
            else:
                deltas = generation.deltas[seen:]
                seen += len(deltas)
                data = b"".join(writer.delta(delta, self._asked_tokens(delta.tokens)) for delta in deltas)
            if not started:
                started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM})
                data = writer.opening() + data
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if not started:
            self._raise_failure()
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        try:
            self._raise_failure()
            end = writer.closing(self._tail(), self._asked_tokens(len(generation.turn.recording.ids)))
        except Exception as error:  # noqa: BLE001  # the stream has begun: whatever failed is told inside it
            end = writer.failure(error)
        if not started:
            end = writer.opening() + end
        await self._send({"type": "http.response.body", "body": end})

    def _failed(self) -> bool:
        return self._generation.turn.status != "finished"

    def _raise_failure(self) -> None:
        if self._generation.error is not None:
            raise self._generation.error
        if self._failed():
            raise SessionClosed("the session ended while this answer was generated")

    def _tail(self) -> AnswerTail:
        turn = self._generation.turn
        assert turn.finish_reason is not None, "a finished turn has its reason"  # noqa: S101  # for the type checker
        return AnswerTail(turn.finish_reason, turn.prompt_tokens, len(turn.recording.ids))

    def _asked_tokens(self, until: int) -> Sequence[TokenInfo]:
        return self._tokens(until) if self._request.logprobs else ()

    def _tokens(self, until: int) -> list[TokenInfo]:
        """Tokens not yet told, without those that have no text for the agent."""
        recording = self._generation.turn.recording
        first, self._told = self._told, until
        return [
            TokenInfo(self._renderer.token_text(token), logprob)
            for token, logprob in zip(recording.ids[first:until], recording.logprobs[first:until], strict=True)
            if token not in self._renderer.eos_ids
        ]


def _split(path: str) -> tuple[str | None, str]:
    """``/s/<session>/v1/<rest>`` or ``/v1/<rest>`` -> (session, ``/<rest>``)."""
    if path.startswith("/v1/"):
        return None, path[3:]
    session, separator, rest = path[3:].partition("/v1/")
    return session, "/" + rest if separator else ""


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _key(headers: dict[bytes, bytes]) -> str:
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise AuthenticationFailed("no API key: send `Authorization: Bearer <api_key of the session>`")
    return key.strip()


def _retries(headers: dict[bytes, bytes]) -> int:
    value = headers.get(b"x-stainless-retry-count", b"0")
    return int(value) if value.isdigit() else 0


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the client went away."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise InvalidRequest(f"the request body is longer than {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _models(live: LiveSession) -> bytes:
    model = {"id": live.session.policy.model, "object": "model", "created": 0, "owned_by": "seamlessflow"}
    return orjson.dumps({"object": "list", "data": [model]})


async def _reply(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _reply_error(send: Send, dialect: Dialect, error: Exception) -> None:
    reply = dialect.error(error)
    await _reply(send, reply.status, [_JSON, _FINAL], reply.body)
