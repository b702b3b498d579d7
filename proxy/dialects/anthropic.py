"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``.

Parameters that have an effect we do not implement are refused by name; a value
that asks for nothing is accepted. Requests to think more or less
(``thinking.budget_tokens``, ``output_config.effort``) are recorded: templates
can only switch thinking on and off. Reasoning comes as ``thinking`` blocks,
empty with ``thinking.display: omitted``: a session knows its own answers also
without their reasoning.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects import fields
from proxy.dialects.anthropic_messages import check_within, read_conversation, read_tools
from proxy.dialects.base import AnswerHead, ChoiceAnswer, ErrorReply, TokenInfo, ToolChoice, TurnRequest, call_id
from proxy.dialects.chat import forced_choice
from proxy.trajectory.answer import Delta
from proxy.trajectory.canonical import ToolCall
from storage.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter

_LABELS = ("metadata", "cache_control")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "mcp_servers": ([],),
    "diagnostics": ({}, {"previous_message_id": None}),
}
_READ = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "model", "max_tokens", "temperature", "top_p", "top_k"),
        *("stop_sequences", "thinking", "output_config", "context_management", "stream"),
    )
)
_EDITS: tuple[Any, ...] = ([], [{"type": "clear_thinking_20251015", "keep": "all"}])
"""Context edits that remove nothing; Claude Code sends the second."""

_DISPLAYS = ("summarized", "omitted")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
}


class AnthropicDialect:
    """See the module; implements :class:`~proxy.dialects.base.Dialect`."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def parse(self, body: bytes) -> TurnRequest:
        data = fields.read_object(body)
        if data.get("max_tokens") is None:
            raise InvalidRequest("max_tokens is required", param="max_tokens")
        request = _read(data)
        if request.messages[-1].role == "assistant":
            raise InvalidRequest(
                "messages must not end with an assistant message: this server does not continue it", param="messages"
            )
        return request

    def parse_count(self, body: bytes) -> TurnRequest:
        """The request whose prompt is to be counted; only what makes the prompt is required."""
        return _read(fields.read_object(body))

    def count(self, tokens: int) -> bytes:
        """The body of a count."""
        return orjson.dumps({"input_tokens": tokens})

    def answer(self, head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> bytes:
        (choice,) = choices
        message = choice.message
        content: list[dict[str, Any]] = []
        if message.reasoning:
            shown = "" if _omitted(head) else message.reasoning
            content.append({"type": "thinking", "thinking": shown, "signature": _signature(head)})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for index, call in enumerate(message.tool_calls):
            # As the model wrote it: a parser has made sure that it is an object.
            content.append({**_tool_use(head, call, index), "input": orjson.Fragment(call.arguments.strip() or "{}")})
        return orjson.dumps(_message(head, content, _stop(choice), _output_usage(choice)))

    def stream(self, head: AnswerHead) -> AnthropicStream:
        return AnthropicStream(head)

    def error(self, error: Exception) -> ErrorReply:
        status, _, _ = fields.classify(error)
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        detail = {"type": kind, "message": _error_message(error)}
        return ErrorReply(status, orjson.dumps({"type": "error", "error": detail, "request_id": None}))


class AnthropicStream:
    """Server-sent events of one answer: blocks one after another, a block at a time, no empty delta."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._omitted = _omitted(head)
        self._index = 0
        self._open = ""  # type of the block that is open
        self._calls = 0

    def opening(self) -> bytes:
        nothing_yet: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=_message(self._head, [], nothing_yet, {"output_tokens": 0}))

    def delta(self, choice: int, delta: Delta, tokens: Sequence[TokenInfo]) -> bytes:
        if delta.call is not None:
            return self._call(delta.call)
        if delta.reasoning:
            start = self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._omitted:
                return start
            return start + self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            start = self._start("text", {"type": "text", "text": ""})
            return start + self._delta({"type": "text_delta", "text": delta.text})
        return b""

    def finish(self, answer: ChoiceAnswer) -> bytes:
        return self._close() + _event("message_delta", delta=_stop(answer), usage=_output_usage(answer))

    def closing(self) -> bytes:
        return _event("message_stop")

    def failure(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + AnthropicDialect().error(error).body + b"\n\n"

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block, unless it is open already."""
        if self._open == kind:
            return b""
        before = self._close()
        self._open = kind
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": _signature(self._head)})
        stop = _event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1
        return signed + stop

    def _call(self, call: ToolCall) -> bytes:
        """A whole block. Its input is empty at first, also when the arguments are known: clients join the deltas."""
        block = {**_tool_use(self._head, call, self._calls), "input": {}}
        self._calls += 1
        start = self._start("tool_use", block)
        arguments = call.arguments.strip()
        delta = self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else b""
        return start + delta + self._close()


def _read(data: dict[str, Any]) -> TurnRequest:
    labels = fields.check_parameters(data, read=_READ, labels=_LABELS, neutral=_NEUTRAL)
    check_within("context_management", data.get("context_management"), neutral={"edits": _EDITS})
    output = data.get("output_config")
    labels |= check_within("output_config", output, read=("format",), labels=("effort",))
    thinking, labels["thinking"] = _thinking(data.get("thinking"))
    tools = read_tools(data.get("tools"))
    choice, parallel = _tool_choice(data.get("tool_choice"), tools)
    return TurnRequest(
        messages=read_conversation(data.get("system"), data.get("messages")),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        model=fields.optional(data, "model", str) or "",
        max_tokens=fields.positive(data, "max_tokens"),
        temperature=fields.number(data, "temperature", 0.0, 1.0),
        top_p=fields.number(data, "top_p", 0.0, 1.0),
        top_k=fields.positive(data, "top_k"),
        stop=_stop_sequences(data),
        json_schema=_schema((output or {}).get("format")),
        thinking=thinking,
        stream=bool(fields.optional(data, "stream", bool)),
        labels={name: value for name, value in labels.items() if value is not None},
    )


def _thinking(value: Any) -> tuple[bool | None, dict[str, Any] | None]:
    """(the template's switch, what is recorded). ``adaptive`` lets the model think, as ``enabled`` does."""
    if value is None:
        return None, None
    check_within("thinking", value, read=("type", "budget_tokens"), neutral={"display": _DISPLAYS})
    kind = value.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UnsupportedParameter(
            f"thinking.type is {kind!r}: must be enabled, disabled or adaptive", param="thinking.type"
        )
    fields.positive(value, "budget_tokens")
    return kind != "disabled", value


def _tool_choice(value: Any, tools: Sequence[dict[str, Any]]) -> tuple[ToolChoice, bool]:
    """(choice, whether several calls are allowed)."""
    if value is None:
        return ToolChoice(), True
    check_within("tool_choice", value, read=("type", "name", "disable_parallel_tool_use"))
    parallel = not fields.optional(value, "disable_parallel_tool_use", bool)
    kind = value.get("type")
    if kind in ("auto", "none"):
        return ToolChoice(kind), parallel
    if kind == "any":
        return forced_choice("", tools), parallel
    if kind == "tool" and isinstance(value.get("name"), str) and value["name"]:
        return forced_choice(value["name"], tools), parallel
    raise InvalidRequest(
        'tool_choice must be of type auto, any, none, or {"type": "tool", "name": ...}', param="tool_choice"
    )


def _stop_sequences(data: dict[str, Any]) -> tuple[str, ...]:
    return fields.stops(fields.optional(data, "stop_sequences", list), "stop_sequences")


def _schema(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    schema = value.get("schema") if isinstance(value, dict) and value.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise InvalidRequest(
            'output_config.format must be {"type": "json_schema", "schema": {...}}', param="output_config.format"
        )
    return schema


def _message(
    head: AnswerHead, content: list[dict[str, Any]], stop: dict[str, str | None], output: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **stop,
        "usage": {
            "input_tokens": head.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            **output,
        },
    }


def _stop(choice: ChoiceAnswer) -> dict[str, str | None]:
    """``stop_reason`` and, if a stop sequence is the reason, which."""
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}


def _output_usage(choice: ChoiceAnswer) -> dict[str, Any]:
    details = {"output_tokens_details": {"thinking_tokens": choice.reasoning_tokens}} if choice.reasoning_tokens else {}
    return {"output_tokens": choice.completion_tokens, **details}


def _tool_use(head: AnswerHead, call: ToolCall, index: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id("toolu_", head.id, index), "name": call.name}


def _omitted(head: AnswerHead) -> bool:
    thinking = head.request.labels.get("thinking")
    return isinstance(thinking, dict) and thinking.get("display") == "omitted"


def _signature(head: AnswerHead) -> str:
    """Stands where clients expect a signature; nobody checks it."""
    return base64.b64encode(head.id.encode()).decode()


def _error_message(error: Exception) -> str:
    """Agents know too long a prompt by these words."""
    if not isinstance(error, ContextLengthExceeded):
        return str(error)
    sizes = f"{error.tokens} tokens > {error.limit} maximum" if error.tokens and error.limit else str(error)
    return f"prompt is too long: {sizes}"


def _event(kind: str, **data: Any) -> bytes:
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", orjson.dumps({"type": kind, **data}), b"\n\n"))
