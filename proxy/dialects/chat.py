"""OpenAI's ``/v1/chat/completions``.

Parameters that have an effect we do not implement are refused by name; a value
that asks for nothing (``n=1``, ``presence_penalty=0``) is accepted. Of
``max_tokens`` and ``max_completion_tokens`` the smaller one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects.base import AnswerHead, AnswerTail, ErrorReply, TokenInfo, TurnRequest
from proxy.dialects.chat_messages import read_messages, read_tools
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import Message, ToolCall
from storage import errors

_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
"""Parameters of which only these values are supported: they ask for nothing beyond the default."""
_READ = frozenset(
    (
        *("messages", "tools", "tool_choice", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
        *("seed", "stop", "stream", "stream_options", "logprobs"),
    )
)


class ChatDialect:
    """See the module; implements :class:`~proxy.dialects.base.Dialect`."""

    keep_alive = b": keep-alive\n\n"

    def parse(self, body: bytes) -> TurnRequest:
        data = _object(body)
        labels = _check_parameters(data)
        tools = read_tools(data.get("tools"))
        options = _optional(data, "stream_options", dict) or {}
        limits = [_positive(data, name) for name in ("max_tokens", "max_completion_tokens")]
        return TurnRequest(
            messages=read_messages(data.get("messages")),
            tools=tools,
            parse_tools=bool(tools) and _tool_choice(data, bool(tools)),
            model=_optional(data, "model", str) or "",
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            temperature=_number(data, "temperature", 0.0, 2.0),
            top_p=_number(data, "top_p", 0.0, 1.0),
            seed=_optional(data, "seed", int),
            stop=_stop(data.get("stop")),
            stream=bool(_optional(data, "stream", bool)),
            include_usage=_include_usage(options),
            logprobs=bool(_optional(data, "logprobs", bool)),
            labels=labels,
        )

    def answer(self, head: AnswerHead, tail: AnswerTail, message: Message, tokens: Sequence[TokenInfo] | None) -> bytes:
        choice = {
            "index": 0,
            "message": response_message(message, head.id),
            "logprobs": None if tokens is None else {"content": _entries(tokens), "refusal": None},
            "finish_reason": tail.finish_reason,
        }
        return orjson.dumps(
            {
                "id": _id(head),
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "choices": [choice],
                "usage": _usage(tail),
            }
        )

    def stream(self, head: AnswerHead, request: TurnRequest) -> ChatStream:
        return ChatStream(head, include_usage=request.include_usage)

    def error(self, error: Exception) -> ErrorReply:
        status, kind, code = _classify(error)
        detail = {
            "message": str(error),
            "type": kind,
            "param": _error_param(error),
            "code": code,
        }
        return ErrorReply(status, orjson.dumps({"error": detail}))


class ChatStream:
    """Server-sent events of one answer; ``finish_reason`` is null on every chunk but the last."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        common = {"id": _id(head), "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        self._common = orjson.dumps(common)[:-1]
        usage = b',"usage":null' if include_usage else b""
        self._before = b"data: " + self._common + usage + b',"choices":[{"index":0,"delta":'
        self._include_usage = include_usage
        self._head = head
        self._calls = 0

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes:
        if delta.call is None:
            return self._chunk({"content": delta.text}, tokens)
        call = {"index": self._calls, **_call(delta.call, self._head.id, self._calls)}
        self._calls += 1
        return self._chunk({"tool_calls": [call]}, tokens)

    def closing(self, tail: AnswerTail, tokens: Sequence[TokenInfo]) -> bytes:
        parts = [self._chunk({}, tokens, finish=orjson.dumps(tail.finish_reason))]
        if self._include_usage:
            parts += [b"data: ", self._common, b',"choices":[],"usage":', orjson.dumps(_usage(tail)), b"}\n\n"]
        parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)

    def failure(self, error: Exception) -> bytes:
        return b"data: " + ChatDialect().error(error).body + b"\n\n"

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[TokenInfo] = (), finish: bytes = b"null") -> bytes:
        logprobs = orjson.dumps({"content": _entries(tokens), "refusal": None}) if tokens else b"null"
        return b"".join(
            (self._before, orjson.dumps(delta), b',"logprobs":', logprobs, b',"finish_reason":', finish, b"}]}\n\n")
        )


def response_message(message: Message, generation: str) -> dict[str, Any]:
    """The assistant's message as an agent gets it."""
    data: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    data["refusal"] = None
    if message.tool_calls:
        data["tool_calls"] = [_call(call, generation, index) for index, call in enumerate(message.tool_calls)]
    return data


def _id(head: AnswerHead) -> str:
    return f"chatcmpl-{head.id}"


def _call(call: ToolCall, generation: str, index: int) -> dict[str, Any]:
    return {
        "id": f"call_{generation[:20]}{index:04d}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage(tail: AnswerTail) -> dict[str, int]:
    return {
        "prompt_tokens": tail.prompt_tokens,
        "completion_tokens": tail.completion_tokens,
        "total_tokens": tail.prompt_tokens + tail.completion_tokens,
    }


def _entries(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
        for token in tokens
    ]


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.InvalidRequest(f"the request body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise errors.InvalidRequest("the request body must be a JSON object")
    return data


def _check_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """Refuse what has no support; returns the labels."""
    labels = {}
    for name, value in data.items():
        if name in _READ or value is None:
            continue
        if name in _LABELS:
            labels[name] = value
        elif name not in _NEUTRAL:
            raise errors.UnsupportedParameter(f"{name} is not supported by this server: leave it out", param=name)
        elif not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            allowed = " or ".join(orjson.dumps(neutral).decode() for neutral in _NEUTRAL[name])
            raise errors.UnsupportedParameter(
                f"{name}={orjson.dumps(value).decode()[:80]} is not supported by this server, only {allowed}",
                param=name,
            )
    return labels


def _same(value: Any, neutral: Any) -> bool:
    # In Python True == 1, in JSON it is not.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _tool_choice(data: dict[str, Any], offered: bool) -> bool:
    """Whether tools may be called. Forcing a call needs a grammar, which engines cannot continue elsewhere."""
    choice = data.get("tool_choice")
    if choice in (None, "auto"):
        return offered
    if choice == "none":
        return False
    raise errors.UnsupportedParameter(
        'tool_choice must be "auto" or "none": this server cannot force a call', param="tool_choice"
    )


def _optional(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise errors.InvalidRequest(f"{name} must be of type {kind.__name__}, not {type(value).__name__}", param=name)
    return value


def _positive(data: dict[str, Any], name: str) -> int | None:
    value: int | None = _optional(data, name, int)
    if value is not None and value < 1:
        raise errors.InvalidRequest(f"{name} is {value}: must be at least 1", param=name)
    return value


def _number(data: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise errors.InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return float(value)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise errors.InvalidRequest("stop must be a non-empty string or a list of them", param="stop")
    return tuple(stops)


def _include_usage(options: dict[str, Any]) -> bool:
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise errors.UnsupportedParameter(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    return bool(options.get("include_usage"))


_CLASSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (errors.ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.UnsupportedParameter, 400, "invalid_request_error", "unsupported_parameter"),
    (errors.AuthenticationFailed, 401, "invalid_request_error", "invalid_api_key"),
    (errors.SessionClosed, 403, "invalid_request_error", "session_closed"),
    (errors.RequestError, 400, "invalid_request_error", None),
    (errors.EngineRejected, 400, "invalid_request_error", "engine_rejected"),
    (errors.NotFoundError, 404, "invalid_request_error", "not_found"),
    (errors.DeadlineError, 504, "server_error", "deadline"),
    (errors.SeamlessFlowError, 500, "server_error", "infrastructure"),
)
"""First match counts. Server errors are final: their generation is over, a retry would only wait again."""


def _classify(error: Exception) -> tuple[int, str, str | None]:
    for kind, status, name, code in _CLASSES:
        if isinstance(error, kind):
            return status, name, code
    return 500, "server_error", "internal"


def _error_param(error: Exception) -> str | None:
    if isinstance(error, errors.ContextLengthExceeded):
        return "messages"
    return error.param if isinstance(error, errors.RequestError) else None
