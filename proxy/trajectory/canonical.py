"""Canonical messages: what two requests must agree on to be the same conversation.

Clients re-serialise history freely: ``null`` for empty content, parts arrays
for strings, new tool-call ids, extra keys. The canonical form drops what means
nothing to the model and keeps what a chat template can render. It is used both
to match a request against recorded turns and to render it, so two requests
with equal canonical forms have equal prompts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson


class ToolCall(NamedTuple):
    """One call of an assistant message; ``arguments`` is the text the model wrote, normally a JSON object."""

    name: str
    arguments: str


class Message(NamedTuple):
    """One message. ``content`` is text; missing, ``null`` and ``""`` are all ``""``.

    Example: ``Message("assistant", tool_calls=(ToolCall("add", '{"a":7,"b":41}'),))``.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""

    def without_reasoning(self) -> Message:
        """As clients send it back that do not keep reasoning."""
        return self._replace(reasoning="") if self.reasoning else self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: tool-call arguments as objects where they are JSON objects."""
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            data["name"] = self.name
        if self.reasoning:
            data["reasoning_content"] = self.reasoning
        if self.tool_calls:
            data["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)}}
                for call in self.tool_calls
            ]
        return data

    def for_chat(self) -> dict[str, Any]:
        """As OpenAI's chat API writes it; call ids, which the canonical form has not, are left out."""
        data = self.for_template()
        for written, call in zip(data.get("tool_calls", ()), self.tool_calls, strict=True):
            written["function"]["arguments"] = call.arguments
        return data

    def digest_input(self) -> bytes:
        """Bytes that are equal for equal canonical messages."""
        calls = [[call.name, parsed_arguments(call.arguments)] for call in self.tool_calls]
        fields = [self.role, self.content, self.reasoning, calls, self.name]
        return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)

    def to_json(self) -> dict[str, Any]:
        """For the journal; :meth:`from_json` is the inverse."""
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            data["reasoning"] = self.reasoning
        if self.tool_calls:
            data["tool_calls"] = [[call.name, call.arguments] for call in self.tool_calls]
        if self.name:
            data["name"] = self.name
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Message:
        calls = tuple(ToolCall(name, arguments) for name, arguments in data.get("tool_calls", ()))
        return cls(data["role"], data["content"], data.get("reasoning", ""), calls, data.get("name", ""))


_BILLING = re.compile(r"(?m)^x-anthropic-billing-header:[^\n]*(?:\n|\Z)")


def without_billing(text: str) -> str:
    """System text without the line that Claude Code changes from request to request: it would make each a new root."""
    return _BILLING.sub("", text) if "x-anthropic-billing-header:" in text else text


def parsed_arguments(text: str) -> Any:
    """The JSON object in ``text``; ``{}`` for no text; ``text`` itself if it is no JSON object."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def tools_digest(tools: Iterable[dict[str, Any]] | None) -> bytes:
    """Start of a conversation's digest chain: other tools make another conversation."""
    data = orjson.dumps(list(tools or ()), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()


def extend_digest(digest: bytes, message: Message) -> bytes:
    """Digest of a conversation from that of its prefix: O(message), not O(conversation)."""
    return hashlib.blake2b(digest + message.digest_input(), digest_size=16).digest()
