"""The agent API as a bare ASGI application: one request in, one recorded turn out.

Written against ASGI because this path bounds the proxy's CPU per token. All
other paths go to the control API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson

from proxy.answering import Answering, Event
from proxy.asgi import GONE, App, Receive, Scope, Send, read_body, reply
from proxy.dialects.anthropic import AnthropicDialect
from proxy.dialects.base import AnswerHead, ChoiceAnswer, Dialect, StreamWriter, TokenInfo, TurnRequest
from proxy.dialects.chat import ChatDialect
from proxy.dialects.completions import CompletionsDialect
from proxy.dialects.responses import ResponsesDialect
from proxy.live_session import LiveSession
from proxy.peers import TOLD, TURN, Elsewhere
from proxy.sessions import Sessions
from proxy.trajectory.turn import Choice
from storage.errors import (
    AuthenticationFailed,
    InvalidRequest,
    NotFoundError,
    SeamlessFlowError,
    SessionClosed,
)

Headers = dict[bytes, bytes]

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say for so long gets a comment."""

WHOLE_KEEP_ALIVE_S = 240.0
"""An answer that is sent whole and is not there after so long is kept open with white space; its status is then
sent already, so that a failure behind it breaks the connection instead of looking like an answer."""

_ANTHROPIC = AnthropicDialect()
DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/completions": CompletionsDialect(),
    "/responses": ResponsesDialect(),
    "/messages": _ANTHROPIC,
}
"""Path below ``/v1`` -> what is spoken there."""
COUNTERS = {"/messages/count_tokens": _ANTHROPIC}
"""Path below ``/v1`` -> the dialect that is asked there for the length of a prompt."""

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_TURN, _TOLD = TURN.encode(), TOLD.encode()
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
        headers: Headers = dict(scope["headers"])
        try:
            await self._serve(scope, receive, send, headers, session, endpoint)
        except SeamlessFlowError as error:
            await _reply_error(send, _spoken(endpoint, headers), error)
        except (_Broken, Elsewhere):
            raise
        except Exception as error:  # noqa: BLE001  # a defect of ours gets the dialect's error shape, and the log
            _log.exception("%s %s", scope["method"], path)
            await _reply_error(
                send, _spoken(endpoint, headers), RuntimeError(f"internal error: {type(error).__name__}")
            )

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, session: str | None, endpoint: str
    ) -> None:
        live = await self._sessions.authenticate(session, _key(headers))
        if endpoint.startswith("/models") and scope["method"] == "GET":
            await reply(send, 200, [_JSON], _models(live.session.policy.model, endpoint))
            return
        if endpoint not in DIALECTS and endpoint not in COUNTERS:
            raise NotFoundError(f"{scope['path']} is not served here: only {', '.join('/v1' + p for p in DIALECTS)}")
        if scope["method"] != "POST":
            raise InvalidRequest(f"{scope['method']} {scope['path']}: only POST is allowed")
        body = await read_body(receive)
        if body is None:
            return
        if endpoint in COUNTERS:
            counter = COUNTERS[endpoint]
            length = await live.prompt_length(counter.parse_count(body))
            await reply(send, 200, [_JSON], counter.count(length))
            return
        await self._answer(scope[GONE], send, live, DIALECTS[endpoint], body, headers)

    async def _answer(
        self,
        gone: asyncio.Future[None],
        send: Send,
        live: LiveSession,
        dialect: Dialect,
        body: bytes,
        headers: Headers,
    ) -> None:
        request = dialect.parse(body)
        turn, skip = _told(headers)
        answering = await live.request(
            request,
            body,
            retried=_retries(headers) > 0,
            idempotency_key=headers.get(b"idempotency-key", b"").decode("latin-1"),
            turn=turn,
        )
        told = False
        try:
            if not gone.done():  # else no engine has been asked yet, nor will be
                answer = _Answer(live, request, answering, dialect, send, skip)
                told = await answer.unless(gone, answer.stream if request.stream else answer.whole)
        finally:
            await live.part(answering, told=told)


class _Broken(Exception):
    """The answer failed when its status had been sent: the server drops the connection."""


class _Answer:
    """One reader of an answer, writing to one client, which has the first ``skip`` bytes of its stream already.

    Raises Elsewhere when this process loses the session: whoever has it then goes on with the answer.
    """

    def __init__(
        self, live: LiveSession, request: TurnRequest, answering: Answering, dialect: Dialect, send: Send, skip: int
    ) -> None:
        self._request = request
        self._answering = answering
        self._dialect = dialect
        self._send = send
        self._renderer = live.session.renderer
        turn = answering.turn
        generations = tuple(choice.generation for choice in turn.choices)
        model = live.session.policy.model
        self._head = AnswerHead(generations[0], turn.created, model, turn.prompt_tokens, request, generations)
        self._told = [0] * len(turn.choices)
        self._skip = skip
        self._hold_s = live.session.policy.hold_limit_s
        self._writing: asyncio.Task[Any] | None = None
        self._left = False

    async def unless(self, gone: asyncio.Future[None], write: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """``write`` until ``gone`` is done; whether all of it was written before."""
        self._writing = asyncio.current_task()
        gone.add_done_callback(self._leave)
        try:
            await write()
        except asyncio.CancelledError:
            if not self._left or self._writing is None or self._writing.uncancel():
                raise
        finally:
            self._writing = None  # the callback may be on its way already
            gone.remove_done_callback(self._leave)
        return not self._left

    def _leave(self, _: object) -> None:
        if self._writing is not None:
            self._left = True
            self._writing.cancel()

    async def whole(self) -> None:
        answering, started = self._answering, False
        loop = asyncio.get_running_loop()
        due = loop.time() + WHOLE_KEEP_ALIVE_S
        while not answering.done:
            if await answering.news(len(answering.events), max(due - loop.time(), 0)):
                continue
            if not started:
                await self._send({"type": "http.response.start", "status": 200, "headers": [_JSON]})
                started = True
            await self._send({"type": "http.response.body", "body": b" ", "more_body": True})
            due = loop.time() + KEEP_ALIVE_S
        try:
            self._raise_failure()
        except Elsewhere:
            raise
        except Exception as error:
            if started:
                raise _Broken from error
            raise
        body = self._dialect.answer(self._head, [self._choice(choice) for choice in answering.turn.choices])
        if started:
            await self._send({"type": "http.response.body", "body": body})
        else:
            await reply(self._send, 200, [_JSON], body)

    async def stream(self) -> None:
        """Headers wait for the first event, so that an early failure gets its status; keep-alives may force them."""
        answering, writer = self._answering, self._dialect.stream(self._head)
        seen, started = 0, False
        while not (answering.done and seen == len(answering.events)):
            if not await answering.news(seen, KEEP_ALIVE_S):
                data = (b"" if started else self._untold(writer.opening())) + self._dialect.keep_alive
            elif answering.done and not started and not answering.finished:
                break
            else:
                events = answering.events[seen:]
                seen += len(events)
                start = b"" if started else writer.opening()
                data = self._untold(start + b"".join([self._written(writer, event) for event in events]))
            if not started:
                started = True
                headers = [*_STREAM, (_TURN, b"%d" % answering.turn.index)]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if not started:
            self._raise_failure()
        try:
            self._raise_failure()
            end = self._untold(writer.closing())
        except Elsewhere:
            raise
        except Exception as error:  # noqa: BLE001  # the stream has begun: whatever failed is told inside it
            end = writer.failure(error)
        await self._send({"type": "http.response.body", "body": end})

    def _untold(self, data: bytes) -> bytes:
        if self._skip:
            skip = min(self._skip, len(data))
            self._skip -= skip
            return data[skip:]
        return data

    def _written(self, writer: StreamWriter, event: Event) -> bytes:
        if event.delta is not None:
            return writer.delta(event.choice, event.delta, self._asked_tokens(event.choice, event.delta.tokens))
        choice = self._answering.turn.choices[event.choice]
        return writer.finish(self._choice(choice)) if choice.status == "finished" else b""

    def _raise_failure(self) -> None:
        if self._answering.lost is not None:
            raise Elsewhere("", hold_s=self._hold_s) from self._answering.lost
        if self._answering.error is not None:
            raise self._answering.error
        if not self._answering.finished:
            raise SessionClosed("the session ended while this answer was generated")

    def _choice(self, choice: Choice) -> ChoiceAnswer:
        assert choice.answer is not None and choice.finish_reason is not None, "it has finished"  # noqa: S101, PT018  # for the type checker
        count = len(choice.recording.ids)
        tokens = self._tokens(choice.index, count) if self._request.logprobs else None
        ended = (choice.answer, choice.finish_reason, choice.stop_string)
        return ChoiceAnswer(choice.index, choice.generation, *ended, count, tokens, self._thought(choice.index))

    def _thought(self, choice: int) -> int:
        """Tokens up to the end of the choice's reasoning."""
        steps = [event.delta for event in self._answering.events if event.choice == choice and event.delta is not None]
        return max((delta.tokens for delta in steps if delta.reasoning), default=0)

    def _asked_tokens(self, choice: int, until: int) -> Sequence[TokenInfo]:
        return self._tokens(choice, until) if self._request.logprobs else ()

    def _tokens(self, choice: int, until: int) -> tuple[TokenInfo, ...]:
        """Tokens not yet told, without those that have no text for the agent."""
        recording, renderer = self._answering.turn.choices[choice].recording, self._renderer
        first, self._told[choice] = self._told[choice], until
        return tuple(
            TokenInfo(
                renderer.token_text(recording.ids[at]),
                recording.logprobs[at],
                tuple((renderer.token_text(int(token)), value) for token, value in recording.tops.get(at, ())),
            )
            for at in range(first, until)
            if recording.ids[at] not in renderer.eos_ids
        )


def _split(path: str) -> tuple[str | None, str]:
    """``/s/<session>/v1/<rest>`` or ``/v1/<rest>`` -> (session, ``/<rest>``)."""
    if path.startswith("/v1/"):
        return None, path[3:]
    session, separator, rest = path[3:].partition("/v1/")
    # Some clients add /v1 to a base URL that ends with it.
    return session, "/" + rest.removeprefix("v1/") if separator else ""


def _spoken(endpoint: str, headers: Headers) -> Dialect:
    """In whose words errors are told; an unknown endpoint's client shows itself by its headers."""
    if endpoint in DIALECTS:
        return DIALECTS[endpoint]
    return _ANTHROPIC if b"anthropic-version" in headers or endpoint in COUNTERS else DIALECTS["/chat/completions"]


def _key(headers: Headers) -> str:
    kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        key = headers.get(b"x-api-key", b"").decode("latin-1")
    if not key.strip():
        raise AuthenticationFailed("no API key: send `Authorization: Bearer <api_key of the session>` or `x-api-key`")
    return key.strip()


def _retries(headers: Headers) -> int:
    value = headers.get(b"x-stainless-retry-count", b"0")
    return int(value) if value.isdigit() else 0


def _told(headers: Headers) -> tuple[int | None, int]:
    """(turn, bytes of its stream that the client has), from another proxy or the one in front of this."""
    turn, _, told = headers.get(_TOLD, b"").partition(b" ")
    return (int(turn), int(told)) if turn.isdigit() and told.isdigit() else (None, 0)


def _models(name: str, endpoint: str) -> bytes:
    """The list, or the one model; fields of both vendors, each of which reads its own."""
    model = {
        "id": name,
        **{"object": "model", "created": 0, "owned_by": "seamlessflow"},
        **{"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"},
    }
    if endpoint == "/models":
        return orjson.dumps({"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name})
    if endpoint != f"/models/{name}":
        raise NotFoundError(
            f"the model {endpoint.removeprefix('/models/')!r} does not exist: this session has {name!r}"
        )
    return orjson.dumps(model)


async def _reply_error(send: Send, dialect: Dialect, error: Exception) -> None:
    told = dialect.error(error)
    await reply(send, told.status, [_JSON, _FINAL], told.body)
