"""Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number."""

from __future__ import annotations

from proxy.trajectory.toolcalls_base import Block, BlockParser, Malformed, described_call, skip_space


class HermesParser(BlockParser):
    """``arguments`` is passed on exactly as the model wrote it."""

    openings = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>")

    def forced_prefix(self, name: str | None) -> str | None:
        return '<tool_call>\n{"name": "' + (f'{name}", "arguments": ' if name else "")

    def _read(self) -> Block:
        start = self._skip_space(self._mark)
        if self._buffer[start] != "{":
            raise Malformed
        end = self._value_end(start)
        close = self._skip(skip_space(self._buffer, end), "</tool_call>")
        call = described_call(self._buffer[start:end])
        return Block(close, call and self._call(*call))
