"""DeepSeek: calls between marks of its own, the arguments in a fenced block (V3, R1) or bare (V3.1)."""

from __future__ import annotations

import re

from proxy.trajectory.toolcalls_base import Block, BlockParser, Malformed, Tools, Undecided, skip_space

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _SEPARATOR, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(r"[^<\n]*")
_FENCED = re.compile(r"[ \t]*([^\s`]+)[ \t]*\n\s*```(?:json)?\s*")
_FENCE = "```"


class DeepSeekParser(BlockParser):
    """``arguments`` is passed on exactly as the model wrote it. ``fenced``: a call is forced in the older form."""

    openings = (_ALL, _ONE, _ALL_END)
    marks = (_ALL, _ALL_END, _ONE, _SEPARATOR, _ONE_END)

    def __init__(self, tools: Tools, *, fenced: bool = False) -> None:
        super().__init__(tools)
        self._fenced = fenced

    def forced_prefix(self, name: str | None) -> str | None:
        if self._fenced:
            return f"{_ALL}{_ONE}function{_SEPARATOR}" + (f"{name}\n```json\n" if name else "")
        return f"{_ALL}{_ONE}" + (f"{name}{_SEPARATOR}" if name else "")

    def _read(self) -> Block:
        text = self._buffer
        if text.startswith(_ALL_END):
            return Block(self._mark, () if self._called else None)
        start = self._mark
        if text.startswith(_ALL):
            start = self._skip(skip_space(text, self._mark), _ONE)
        head = _HEAD.match(text, start)
        behind = head.end() if head else start
        return self._arguments(text[start:behind].strip(), self._skip(behind, _SEPARATOR))

    def _arguments(self, name: str, start: int) -> Block:
        text = self._buffer
        brace = text.find("{", start)
        if brace < 0:
            raise Malformed if _ONE_END in text[start:] else Undecided
        lead = text[start:brace]
        fenced = _FENCED.fullmatch(lead)
        if not fenced and lead.strip():
            raise Malformed
        at = end = self._value_end(brace)
        if fenced:
            at = self._skip(skip_space(text, at), _FENCE)
        at = self._skip(skip_space(text, at), _ONE_END)
        return Block(at, self._call(fenced[1] if fenced else name, text[brace:end]))
