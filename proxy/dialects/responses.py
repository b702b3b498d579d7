"""OpenAI's ``/v1/responses``.

Parameters that have an effect we do not implement are refused by name. The
answer repeats the parameters as they are in force: a tool's ``strict`` is false
and ``reasoning.summary`` null, whatever was asked for, since no call is
constrained and no summary is written. Of ``reasoning.effort`` only "off" counts
(``none``, ``minimal``), as in the chat dialect. ``top_logprobs`` asks for
log-probabilities by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.dialects import fields
from proxy.dialects.base import AnswerHead, ChoiceAnswer, ErrorReply
from proxy.dialects.responses_items import check_nested, read_input, read_tool_choice, read_tools
from proxy.dialects.responses_output import ResponsesRequest, answer_items, error_detail, response, status_of
from proxy.dialects.responses_stream import ResponsesStream
from proxy.trajectory.canonical import Message
from storage.errors import InvalidRequest, PreviousResponseNotFound, UnsupportedParameter

_LABELS = (
    *("user", "metadata", "client_metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
_READ = frozenset(
    (
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "model", "max_output_tokens"),
        *("temperature", "top_p", "text", "reasoning", "include", "top_logprobs", "store", "previous_response_id"),
        *("stream", "stream_options"),
    )
)
_INCLUDE = ("reasoning.encrypted_content", "message.output_text.logprobs")
_EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = (None, "auto", "concise", "detailed")


class ResponsesDialect:
    """See the module; implements :class:`~proxy.dialects.base.Dialect`."""

    keep_alive = b": keep-alive\n\n"

    def parse(self, body: bytes) -> ResponsesRequest:
        data = fields.read_object(body)
        labels = fields.check_parameters(data, read=_READ, labels=_LABELS, neutral=_NEUTRAL)
        _check_stream_options(data)
        tools, custom = read_tools(data.get("tools"))
        include, top_logprobs = _include(data.get("include")), _top_logprobs(data)
        instructions = fields.optional(data, "instructions", str)
        first = (Message("system", instructions),) if instructions else ()
        form, effort = _format(data), _effort(data)
        return ResponsesRequest(
            messages=first + read_input(data.get("input")),
            tools=tools,
            tool_choice=read_tool_choice(data.get("tool_choice"), tools),
            parallel_tool_calls=fields.optional(data, "parallel_tool_calls", bool) is not False,
            model=fields.optional(data, "model", str) or "",
            max_tokens=fields.positive(data, "max_output_tokens"),
            temperature=fields.number(data, "temperature", 0.0, 2.0),
            top_p=fields.number(data, "top_p", 0.0, 1.0),
            json_schema=_schema(form),
            thinking=False if effort in ("none", "minimal") else None,
            stream=bool(fields.optional(data, "stream", bool)),
            logprobs=_INCLUDE[1] in include or top_logprobs > 0,
            top_logprobs=top_logprobs,
            previous=_previous(data),
            instructions=bool(first),
            store=fields.optional(data, "store", bool) is not False,
            labels=labels,
            echo=_echo(data, labels, form, effort),
            custom_tools=custom,
            seal_reasoning=_INCLUDE[0] in include,
        )

    def answer(self, head: AnswerHead, choices: Sequence[ChoiceAnswer]) -> bytes:
        (answer,) = choices
        return orjson.dumps(response(head, status_of(answer), answer_items(head, answer), answer))

    def stream(self, head: AnswerHead) -> ResponsesStream:
        return ResponsesStream(head)

    def error(self, error: Exception) -> ErrorReply:
        status, detail = error_detail(error)
        return ErrorReply(status, orjson.dumps({"error": detail}))


def _echo(data: dict[str, Any], labels: dict[str, Any], form: dict[str, Any], effort: str | None) -> dict[str, Any]:
    return {
        "instructions": data.get("instructions"),
        "metadata": labels.get("metadata", {}),
        "prompt_cache_key": labels.get("prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": labels.get("safety_identifier"),
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": [
            {**tool, "strict": False} if tool["type"] == "function" else {**tool, "format": {"type": "text"}}
            for tool in data.get("tools") or ()
        ],
        "user": labels.get("user"),
    }


def _check_stream_options(data: dict[str, Any]) -> None:
    options = fields.optional(data, "stream_options", dict) or {}
    check_nested(options, "stream_options", read=(), neutral={"include_obfuscation": (False,)})
    if options and not data.get("stream"):
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")


def _include(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("include must be a list", param="include")
    for entry in value:
        if entry not in _INCLUDE:
            raise UnsupportedParameter(
                f"include: {entry!r} is not supported by this server, only {' and '.join(_INCLUDE)}", param="include"
            )
    return value


def _top_logprobs(data: dict[str, Any]) -> int:
    count: int = fields.optional(data, "top_logprobs", int) or 0
    if not 0 <= count <= 20:
        raise InvalidRequest("top_logprobs must be from 0 to 20", param="top_logprobs")
    return count


def _format(data: dict[str, Any]) -> dict[str, Any]:
    """``text.format``; of ``text`` nothing else has an effect."""
    text = fields.optional(data, "text", dict) or {}
    check_nested(text, "text", read=("format",), neutral={"verbosity": ("medium",)})
    form = text.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequest("text.format.type must be text, json_object or json_schema", param="text.format")
    if form["type"] == "json_schema":
        for name, kind in (("schema", dict), ("name", str)):
            if not isinstance(form.get(name), kind):
                raise InvalidRequest(f"text.format.{name} must be of type {kind.__name__}", param=f"text.format.{name}")
    return form


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    if form["type"] == "json_object":
        return {"type": "object"}
    schema: dict[str, Any] | None = form.get("schema")
    return schema if form["type"] == "json_schema" else None


def _effort(data: dict[str, Any]) -> str | None:
    reasoning = fields.optional(data, "reasoning", dict) or {}
    read = {"effort": _EFFORTS, "summary": _SUMMARIES, "generate_summary": _SUMMARIES}
    check_nested(reasoning, "reasoning", read=read, neutral={"context": ("auto",), "mode": ("standard",)})
    for name, values in read.items():
        if reasoning.get(name) not in values:
            known = ", ".join(value for value in values if value)
            raise InvalidRequest(f"reasoning.{name} must be one of {known}", param=f"reasoning.{name}")
    effort: str | None = reasoning.get("effort")
    return effort


def _previous(data: dict[str, Any]) -> str:
    """The generation that ``previous_response_id`` means."""
    value = fields.optional(data, "previous_response_id", str)
    if value is None:
        return ""
    generation = value.removeprefix("resp_")
    if not generation or generation == value:
        raise PreviousResponseNotFound(f"there is no response {value!r}", param="previous_response_id")
    return str(generation)
