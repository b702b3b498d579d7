"""The four dialects as raw HTTP, so that one scenario can be played in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]


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
    keep_alive: bytes = b": keep-alive\n\n"
    limit: str = "max_tokens"
    """Name of the token limit."""

    def __str__(self) -> str:
        return self.name

    def body(self, text: str = "hi", **more: Any) -> Json:
        return {"model": "any", **self.make(text), **more}

    def said(self, data: bytes) -> str:
        """The text of an answer, whole or streamed."""
        if _is_whole(data):
            return self.text_of(orjson.loads(data))
        return "".join(self.delta_of(event) for event in events(data))

    def tokens(self, data: bytes) -> int | None:
        """Generated tokens that the answer tells, as last told."""
        told = [self.usage_of(one) for one in ([orjson.loads(data)] if _is_whole(data) else events(data))]
        return next((count for count in reversed(told) if count is not None), None)

    def identity(self, data: bytes) -> tuple[Any, ...]:
        """Id and time of an answer, which must be the same in all its events."""
        found = [orjson.loads(data)] if _is_whole(data) else events(data)
        identities = {identity for one in found if (identity := self.identity_of(one)) is not None}
        (only,) = identities
        return only


def _is_whole(data: bytes) -> bool:
    return data.lstrip().startswith(b"{")


def events(data: bytes) -> Iterator[Json]:
    """The JSON objects of an event stream."""
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


CHAT = Spoken(
    "chat",
    "/v1/chat/completions",
    _chat,
    lambda answer: answer["choices"][0]["message"]["content"] or "",
    _chat_delta,
    _openai_usage,
    _openai_identity,
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
    b'event: ping\ndata: {"type":"ping"}\n\n',
)
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
