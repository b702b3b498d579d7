"""Llama 3: an answer of ``{"name": ..., "parameters": {...}}`` objects, apart by ``;`` or white space.

Objects are calls at the start of the answer, behind another call, and behind
``<|python_tag|>``; elsewhere they are text.
"""

from __future__ import annotations

import re

from proxy.trajectory.toolcalls_base import Block, BlockParser, Malformed, Tools, described_call, skip_space

_TAG = "<|python_tag|>"
_SEPARATOR = re.compile(r"\s*(?:;\s*)?")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = ("name", "parameters", "arguments", "type")


class LlamaJsonParser(BlockParser):
    """``parameters`` is passed on exactly as the model wrote it."""

    openings = (_TAG,)
    marks = (_TAG,)

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._may_begin = True

    def forced_prefix(self, name: str | None) -> str | None:
        return '{"name": "' + (f'{name}", "parameters": ' if name else "")

    def _next(self, *, last: bool) -> tuple[int, int]:
        """Where a call may begin, its opening mark is a separator and the brace."""
        if self._may_begin:
            start = self._object_start(0)
            if start < len(self._buffer):
                self._may_begin = False
                if self._buffer[start] == "{":
                    return 0, start + 1
            elif not last:
                return 0, 0
        return super()._next(last=last)

    def _read(self) -> Block:
        text = self._buffer
        start = self._skip_space(self._mark) if text.startswith(_TAG) else self._mark - 1
        key = _FIRST_KEY.match(text, start)
        if text[start] != "{" or (key is not None and key[1] not in _KEYS):
            raise Malformed
        end = self._value_end(start)
        described = described_call(text[start:end])
        calls = described and self._call(*described)
        if not calls:
            raise Malformed
        self._may_begin = True
        return Block(end, calls)

    def _object_start(self, at: int) -> int:
        if not self._called:
            return skip_space(self._buffer, at)
        match = _SEPARATOR.match(self._buffer, at)
        return match.end() if match else at
