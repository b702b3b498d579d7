"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

A value is the text between its tags without one line break at each end. It
becomes JSON by the tool's schema: a string keeps every character, another
type is passed on as written; what does not fit its type is passed on as a
string, for the tool to refuse.
"""

from __future__ import annotations

import json
import re
from typing import Any

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.toolcalls_base import Block, BlockParser, Tools, Undecided, functions, json_value, skip_space

_END = re.compile(r"</function>\s*</tool_call>")
_FUNCTION = re.compile(r"([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class QwenXmlParser(BlockParser):
    """Types come from the request's tools; a parameter that the schema does not know is a string."""

    openings = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._schemas = {function.get("name"): _properties(function) for function in functions(tools)}
        self._from = 0

    def forced_prefix(self, name: str | None) -> str | None:
        return "<tool_call>\n<function=" + (f"{name}>\n" if name else "")

    def _next(self, *, last: bool) -> tuple[int, int]:
        self._from = 0
        return super()._next(last=last)

    def _read(self) -> Block:
        text = self._buffer
        start = self._skip(skip_space(text, self._mark), "<function=")
        end = _END.search(text, max(start, self._from))
        if end is None:
            last = text.rfind("</function>", self._from)
            self._from = last if last >= 0 else max(start, len(text) - len("</function>"))
            raise Undecided
        return Block(end.end(), self._function(text[start : end.start()]))

    def _function(self, text: str) -> tuple[ToolCall, ...] | None:
        head = _FUNCTION.match(text)
        if head is None:
            return None
        name, at = head[1].strip(), head.end()
        schema = self._schemas.get(name, {})
        written: dict[str, str] = {}
        while parameter := _PARAMETER.match(text, at):
            key = parameter[1].strip()
            written[key] = typed(_unwrapped(parameter[2]), schema.get(key))
            at = parameter.end()
        if text[at:].strip():
            return None
        fields = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in written.items()]
        return self._call(name, "{" + ", ".join(fields) + "}")


def typed(text: str, schema: Any) -> str:
    """``text`` as JSON of the type that ``schema`` names."""
    kinds = _kinds(schema)
    plain = text.strip()
    if "null" in kinds and plain in ("null", "None"):
        return "null"
    if "boolean" in kinds and plain in ("true", "True", "false", "False"):
        return plain.lower()
    if "string" not in kinds:
        value = json_value(plain)
        if any(_fits(value, kind) for kind in kinds):
            return plain
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """The JSON types that ``schema`` allows; empty: it does not say."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(choice)
    return kinds


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str, type | tuple[type, ...]] = {
        "integer": int,
        "number": (int, float),
        "object": dict,
        "array": list,
    }
    return isinstance(value, types.get(kind, ()))


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _unwrapped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
