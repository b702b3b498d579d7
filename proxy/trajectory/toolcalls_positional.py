"""Calls as source text: ``name(7, 41)``, between marks of the run file's choice."""

from __future__ import annotations

import json
import re
from typing import Any

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.toolcalls_base import Part, Tools, functions, json_value


class PositionalParser:
    """``name(7, 41)`` between ``opening`` and ``closing`` (both may be empty); names come from the request's tools.

    Only an answer that is nothing but calls, and that the model ended itself,
    is read as calls. Values are JSON; a bare word is a string.
    """

    def __init__(self, tools: Tools, opening: str, closing: str) -> None:
        self._functions = {str(function.get("name")): function for function in functions(tools)}
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

    def forced_prefix(self, name: str | None) -> str | None:
        return f"{self._opening}{name}(" if name else self._opening or None

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
            read = _written(value, kind.get("type") if isinstance(kind, dict) else None)
            if read is None:
                return None
            written.append(f"{json.dumps(key, ensure_ascii=False)}:{read}")
        return ToolCall(name, "{" + ",".join(written) + "}")


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


def _written(text: str, kind: Any) -> str | None:
    """``text`` as JSON of schema type ``kind``, numbers exactly as written; None if it does not fit."""
    value = json_value(text)
    if value is None and text != "null":
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
