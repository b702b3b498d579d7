"""How one model's answers are read: the text of its ids, and where reasoning and calls are in it.

The marks of calls and reasoning are special tokens in some tokenizers. The
parsers must see them; the agent must not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from proxy.trajectory.detokenizer import Decode, overlap
from proxy.trajectory.reasoning import Reasoning, ReasoningParser, reasoning_factory
from proxy.trajectory.toolcalls import ParserFactory, Part, ToolParser, Tools


class Reading:
    """``hidden`` are marks which ``decode`` shows and the agent must not see."""

    def __init__(self, decode: Decode, hidden: Sequence[str], calls: ParserFactory, reasoning: str) -> None:
        self.decode = decode
        self._hidden = tuple(hidden)
        self._calls = calls
        self._reasoning = reasoning_factory(reasoning)

    def reasoning(self, *, opened: bool) -> ReasoningParser:
        """A parser for one answer; ``opened``: the prompt ended inside a block of reasoning."""
        parser = self._reasoning(opened)
        return _HidingReasoning(parser, self._hidden) if self._hidden else parser

    def calls(self, tools: Tools) -> ToolParser:
        """A parser for the answer's text behind its reasoning."""
        parser = self._calls(tools)
        return _HidingCalls(parser, self._hidden) if self._hidden else parser


class _Hider:
    """Takes marks out of text that comes in parts, holding back what may be the beginning of one."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))
        self._held = ""

    def feed(self, text: str) -> str:
        *whole, tail = self._pattern.split(self._held + text)
        keep = len(tail) - overlap(tail, self._marks)
        self._held = tail[keep:]
        return "".join(whole) + tail[:keep]

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest


class _HidingCalls:
    def __init__(self, parser: ToolParser, marks: Sequence[str]) -> None:
        self._parser, self._hider = parser, _Hider(marks)
        self.forced_prefix = parser.forced_prefix

    def feed(self, text: str) -> list[Part]:
        return self._shown(self._parser.feed(text))

    def finish(self, *, ended: bool) -> list[Part]:
        shown = self._shown(self._parser.finish(ended=ended))
        rest = self._hider.flush()
        return [*shown, rest] if rest else shown

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            text = self._hider.feed(part) if isinstance(part, str) else self._hider.flush()
            shown += [text] if text else []
            shown += [] if isinstance(part, str) else [part]
        return shown


class _HidingReasoning:
    """Only reasoning is cleaned here: the answer's text goes through the call parser, which must see the marks."""

    def __init__(self, parser: ReasoningParser, marks: Sequence[str]) -> None:
        self._parser, self._hider = parser, _Hider(marks)

    def feed(self, text: str) -> list[str | Reasoning]:
        return self._shown(self._parser.feed(text))

    def finish(self) -> list[str | Reasoning]:
        shown = self._shown(self._parser.finish())
        rest = self._hider.flush()
        return [*shown, Reasoning(rest)] if rest else shown

    def _shown(self, pieces: list[str | Reasoning]) -> list[str | Reasoning]:
        shown: list[str | Reasoning] = []
        for piece in pieces:
            text = self._hider.feed(piece.text) if isinstance(piece, Reasoning) else self._hider.flush()
            shown += [Reasoning(text)] if text else []
            shown += [] if isinstance(piece, Reasoning) else [piece]
        return shown
