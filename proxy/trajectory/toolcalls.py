"""Tool calls in generated text, read as it streams.

A parser gets the answer's text in parts and returns what is certain: text for
the agent, or whole calls. Splitting the text elsewhere gives the same result.
What is no well-formed call of a tool that the request offered stays text: a
malformed call is the model's own. Nothing is ever evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from proxy.trajectory.canonical import ToolCall

Part = str | ToolCall
Tools = Sequence[dict[str, Any]]


class ToolParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """What became certain with ``text``."""
        ...

    def finish(self, *, ended: bool) -> list[Part]:
        """The rest. ``ended``: the model ended its answer by itself, it was not cut."""
        ...


ParserFactory = Callable[[Tools], ToolParser]


class NoParser:
    """Everything is text."""

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self, *, ended: bool) -> list[Part]:
        return []


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number, text around them kept.

    ``arguments`` is passed on exactly as the model wrote it.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Tools) -> None:
        self._names = {_function(tool).get("name") for tool in tools}
        self._buffer = ""
        self._called = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while True:
            start = self._buffer.find(self._OPEN)
            if start < 0:
                self._release(parts)
                return parts
            end = self._buffer.find(self._CLOSE, start)
            if end < 0:
                self._take(parts, start)
                return parts
            self._take(parts, start)
            block, self._buffer = self._split_block()
            call = self._parse(block)
            self._called = self._called or call is not None
            parts.append(block if call is None else call)

    def finish(self, *, ended: bool) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        if not rest or (self._called and not rest.strip()):
            return []
        return [rest]

    def _release(self, parts: list[Part]) -> None:
        """Pass on text that cannot belong to a call; white space waits, in front of a call it means nothing."""
        keep = next((n for n in range(len(self._OPEN) - 1, 0, -1) if self._buffer.endswith(self._OPEN[:n])), 0)
        certain = self._buffer[: len(self._buffer) - keep].rstrip()
        if certain:
            parts.append(certain)
            self._buffer = self._buffer[len(certain) :]

    def _take(self, parts: list[Part], start: int) -> None:
        text = self._buffer[:start].rstrip()
        if text:
            parts.append(text)
        self._buffer = self._buffer[start:]

    def _split_block(self) -> tuple[str, str]:
        end = self._buffer.index(self._CLOSE) + len(self._CLOSE)
        return self._buffer[:end], self._buffer[end:]

    def _parse(self, block: str) -> ToolCall | None:
        fields = _object_fields(block[len(self._OPEN) : -len(self._CLOSE)].strip())
        if fields is None or "name" not in fields:
            return None
        try:
            name = json.loads(fields["name"])
            arguments = fields.get("arguments", "{}")
            valid = name in self._names and isinstance(json.loads(arguments), dict)
        except (json.JSONDecodeError, TypeError):
            return None
        return ToolCall(name, arguments) if valid else None


class PositionalParser:
    """``name(7, 41)`` between ``opening`` and ``closing`` (both may be empty); names come from the request's tools.

    Only an answer that is nothing but calls, and that the model ended itself,
    is read as calls. Values are JSON; a bare word is a string.
    """

    def __init__(self, tools: Tools, opening: str, closing: str) -> None:
        self._functions = {str(_function(tool).get("name")): _function(tool) for tool in tools}
        self._opening, self._closing = opening, closing
        self._starts = [f"{opening}{name}(" for name in self._functions]
        self._call = re.compile(
            re.escape(opening)
            + "("
            + "|".join(re.escape(name) for name in sorted(self._functions, key=len, reverse=True))
            + r")\(((?:[^()\"]|\"(?:[^\"\\]|\\.)*\")*)\)"
            + re.escape(closing)
        )
        self._buffer = ""
        self._text_only = not self._functions

    def feed(self, text: str) -> list[Part]:
        if self._text_only:
            return [text] if text else []
        self._buffer += text
        if any(self._buffer.startswith(start) or start.startswith(self._buffer) for start in self._starts):
            return []
        self._text_only = True
        rest, self._buffer = self._buffer, ""
        return [rest] if rest else []

    def finish(self, *, ended: bool) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        calls = self._calls(rest) if ended else None
        if calls:
            return list(calls)
        return [rest] if rest else []

    def _calls(self, text: str) -> list[ToolCall] | None:
        calls, position = [], 0
        while position < len(text):
            match = self._call.match(text, position)
            call = self._read(match[1], match[2]) if match else None
            if match is None or call is None:
                return None
            calls.append(call)
            position = match.end()
            while calls and text[position : position + 1] == "\n" and position + 1 < len(text):
                position += 1
        return calls

    def _read(self, name: str, arguments: str) -> ToolCall | None:
        schema = self._functions[name].get("parameters") or {}
        properties: dict[str, Any] = schema.get("properties") or {}
        values = _split_values(arguments)
        if not len(schema.get("required") or ()) <= len(values) <= len(properties):
            return None
        written = []
        for (key, kind), value in zip(properties.items(), values, strict=False):
            read = _json_value(value, kind.get("type") if isinstance(kind, dict) else None)
            if read is None:
                return None
            written.append(f"{json.dumps(key, ensure_ascii=False)}:{read}")
        return ToolCall(name, "{" + ",".join(written) + "}")


def parser_factory(kind: str, opening: str = "", closing: str = "") -> ParserFactory:
    """The parser of ``model.tool_parser``: ``none``, ``hermes`` or ``positional``."""
    if kind == "hermes":
        return HermesParser
    if kind == "positional":
        return lambda tools: PositionalParser(tools, opening, closing)
    return lambda tools: NoParser()


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def _object_fields(text: str) -> dict[str, str] | None:
    """Key -> exact source text of its value; None if ``text`` is no JSON object."""
    fields: dict[str, str] = {}
    try:
        if not isinstance(json.loads(text), dict):
            return None
        position = 1
        while True:
            position = _skip(text, position)
            if text[position] == "}":
                return fields
            if text[position] == ",":
                position = _skip(text, position + 1)
            key, position = _DECODER.raw_decode(text, position)
            start = _skip(text, _skip(text, position) + 1)
            _, position = _DECODER.raw_decode(text, start)
            fields[key] = text[start:position]
    except (json.JSONDecodeError, RecursionError):
        return None


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


_VALUE = re.compile(r"\s*((?:[^,\"]|\"(?:[^\"\\]|\\.)*\")*)")


def _split_values(text: str) -> list[str]:
    """``7, "a,b"`` -> ``['7', '"a,b"']``."""
    if not text.strip():
        return []
    values, position = [], 0
    while True:
        match = _VALUE.match(text, position)
        end = match.end() if match else len(text)
        values.append(text[position:end].strip())
        if end >= len(text):
            return values
        position = end + 1


def _no_constant(name: str) -> Any:
    raise json.JSONDecodeError("no JSON value", name, 0)


def _json_value(text: str, kind: Any) -> str | None:
    """``text`` as JSON of schema type ``kind``, numbers exactly as written; None if it does not fit."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError:
        value = text
        text = json.dumps(text, ensure_ascii=False)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return text if number and isinstance(value, int) else None
    if kind == "number":
        return text if number else None
    if kind == "string" and not isinstance(value, str):
        return json.dumps(text, ensure_ascii=False)
    if kind == "boolean" and not isinstance(value, bool):
        return None
    return text
