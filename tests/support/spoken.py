"""The four dialects as raw HTTP, so that one scenario can be played in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]
ADD: Json = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@dataclass(frozen=True)
class Spoken:
    """One dialect: how it asks and what its answers say. ``name`` is also the test's id."""

    name: str
    path: str
    """Below the session's URL."""
    make: Callable[[str], Json]
    text_of: Callable[[Json], str]
    """Text of a whole answer."""
    delta_of: Callable[[Json], str]
    """Text of one event of a stream."""
    usage_of: Callable[[Json], int | None]
    """Generated tokens that a whole answer, or an event, tells."""
    identity_of: Callable[[Json], tuple[Any, ...] | None]
    """Id and time of a whole answer, or of an event that has them."""
    calls_of: Callable[[list[Json]], list[tuple[str, str]]] = lambda found: []
    """(name, arguments as JSON text) of each call of a whole answer, or of the events of a stream."""
    tools: tuple[Json, ...] = ()
    """The tool ``add`` in the dialect's form."""
    keep_alive: bytes = b": keep-alive\n\n"
    limit: str = "max_tokens"
    """Name of the token limit."""

    def __str__(self) -> str:
        return self.name

    def body(self, text: str = "hi", **more: Any) -> Json:
        return {"model": "any", **self.make(text), **more}

    def said(self, data: bytes) -> str:
        """The text of an answer, whole or streamed."""
        read = self.text_of if data.lstrip().startswith(b"{") else self.delta_of
        return "".join(read(one) for one in events(data))

    def calls(self, data: bytes) -> list[tuple[str, str]]:
        """(name, arguments) of each call of an answer, whole or streamed."""
        return self.calls_of(list(events(data)))

    def tokens(self, data: bytes) -> int | None:
        """Generated tokens that the answer tells, as last told."""
        told = [count for one in events(data) if (count := self.usage_of(one)) is not None]
        return told[-1] if told else None

    def identity(self, data: bytes) -> tuple[Any, ...]:
        """Id and time of an answer, which must be the same in all its events."""
        identities = {identity for one in events(data) if (identity := self.identity_of(one)) is not None}
        (only,) = identities
        return only


def events(data: bytes) -> Iterator[Json]:
    """The JSON objects of an event stream, or the only one of a whole answer."""
    if data.lstrip().startswith(b"{"):
        yield orjson.loads(data)
        return
    for event in data.split(b"\n\n"):
        for line in event.split(b"\n"):
            if line.startswith(b"data: {"):
                yield orjson.loads(line[6:])


def _chat(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


def _chat_delta(event: Json) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _response_text(answer: Json) -> str:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def _openai_usage(data: Json) -> int | None:
    return data["usage"]["completion_tokens"] if data.get("usage") else None


def _output_usage(data: Json) -> int | None:
    usage = (data.get("response") or data).get("usage")
    return usage["output_tokens"] if usage else None


def _openai_identity(data: Json) -> tuple[Any, ...]:
    return data["id"], data["created"]


def _response_identity(data: Json) -> tuple[Any, ...] | None:
    response = data if data.get("object") == "response" else data.get("response")
    return (response["id"], response["created_at"]) if response else None


def _message_identity(data: Json) -> tuple[Any, ...] | None:
    message = data if data.get("type") == "message" else data.get("message")
    return (message["id"],) if message else None


def _chat_calls(found: list[Json]) -> list[tuple[str, str]]:
    calls: dict[int, tuple[str, str]] = {}
    for choice in [choice for one in found for choice in one["choices"]]:
        written = choice.get("message") or choice["delta"]
        for at, call in enumerate(written.get("tool_calls") or ()):
            name, arguments = calls.get(index := call.get("index", at), ("", ""))
            function = call["function"]
            calls[index] = name + (function.get("name") or ""), arguments + (function.get("arguments") or "")
    return [calls[index] for index in sorted(calls)]


def _response_calls(found: list[Json]) -> list[tuple[str, str]]:
    response = found[-1].get("response", found[-1])
    return [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]


def _message_calls(found: list[Json]) -> list[tuple[str, str]]:
    if found[0]["type"] == "message":
        blocks = [block for block in found[0]["content"] if block["type"] == "tool_use"]
        return [(block["name"], orjson.dumps(block["input"]).decode()) for block in blocks]
    names = {one["index"]: one["content_block"].get("name") for one in found if one["type"] == "content_block_start"}
    parts = dict.fromkeys([index for index, name in names.items() if name], "")
    for one in found:
        if one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta":
            parts[one["index"]] += one["delta"]["partial_json"]
    return [(names[index], text) for index, text in parts.items()]


_FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": ADD}

CHAT = Spoken(
    "chat",
    "/v1/chat/completions",
    _chat,
    lambda answer: answer["choices"][0]["message"]["content"] or "",
    _chat_delta,
    _openai_usage,
    _openai_identity,
    _chat_calls,
    ({"type": "function", "function": _FUNCTION},),
)
COMPLETIONS = Spoken(
    "completions",
    "/v1/completions",
    lambda text: {"prompt": text, "max_tokens": 300},
    lambda answer: str(answer["choices"][0]["text"]),
    lambda event: "".join(choice["text"] for choice in event["choices"]),
    _openai_usage,
    _openai_identity,
)
RESPONSES = Spoken(
    "responses",
    "/v1/responses",
    lambda text: {"input": text},
    _response_text,
    lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    _output_usage,
    _response_identity,
    _response_calls,
    ({"type": "function", **_FUNCTION},),
    limit="max_output_tokens",
)
MESSAGES = Spoken(
    "messages",
    "/v1/messages",
    lambda text: {**_chat(text), "max_tokens": 300},
    lambda answer: "".join(block["text"] for block in answer["content"] if block["type"] == "text"),
    lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
    _output_usage,
    _message_identity,
    _message_calls,
    ({"name": "add", "description": "Add two numbers.", "input_schema": ADD},),
    b'event: ping\ndata: {"type":"ping"}\n\n',
)
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
CALLING = (CHAT, RESPONSES, MESSAGES)
"""Those that have tools."""
