"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and newer ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

import re

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.toolcalls_base import Block, BlockParser, Malformed, Tools, Undecided, array_items, described_call

_NAME = re.compile(r"[\w.-]+")
_ID = re.compile(r"\w*")


class MistralParser(BlockParser):
    """An array is all calls or all text. ``named``: a call is forced in the newer form."""

    openings = ("[TOOL_CALLS]",)
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, tools: Tools, *, named: bool = False) -> None:
        super().__init__(tools)
        self._named = named

    def forced_prefix(self, name: str | None) -> str | None:
        if self._named:
            return "[TOOL_CALLS]" + (f"{name}[ARGS]" if name else "")
        return '[TOOL_CALLS][{"name": "' + (f'{name}", "arguments": ' if name else "")

    def _read(self) -> Block:
        start = self._skip_space(self._mark)
        if self._buffer[start] != "[":
            return self._read_named(start)
        end = self._value_end(start)
        return Block(end, self._array(self._buffer[start:end]))

    def _array(self, text: str) -> tuple[ToolCall, ...] | None:
        calls: list[ToolCall] = []
        for item in array_items(text) or ():
            described = described_call(item)
            call = described and self._call(*described)
            if not call:
                return None
            calls += call
        return tuple(calls) or None

    def _read_named(self, start: int) -> Block:
        name = _NAME.match(self._buffer, start)
        if name is None:
            raise Malformed
        at = name.end()
        if self._buffer.startswith("[CALL_ID]", at):
            call_id = _ID.match(self._buffer, at + len("[CALL_ID]"))
            at = call_id.end() if call_id else at
        elif "[CALL_ID]".startswith(self._buffer[at:]):
            raise Undecided
        at = self._skip_space(self._skip(at, "[ARGS]"))
        if self._buffer[at] != "{":
            raise Malformed
        end = self._value_end(at)
        return Block(end, self._call(name[0], self._buffer[at:end]))
