"""From a generation's ids to what the agent is shown: text, tool calls, the reason it ended.

Pure and incremental; feeding the ids in other portions gives the same answer,
which is why an answer can be rebuilt from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.detokenizer import Decode, Detokenizer, StopScanner
from proxy.trajectory.toolcalls import Part, ToolParser

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of an answer: either text or one whole call. ``tokens``: ids of the generation seen up to here."""

    text: str
    call: ToolCall | None
    tokens: int


class AnswerBuilder:
    """Builds one answer. ``silent`` ids (end of turn) have no text."""

    def __init__(
        self, decode: Decode, parser: ToolParser, *, stops: Sequence[str] = (), silent: frozenset[int]
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stops)
        self._one_by_one = bool(stops)
        self._parser = parser
        self._silent = silent
        self._tokens = 0
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, once it has."""
        return self._scanner.matched

    def feed(self, ids: Sequence[int]) -> tuple[int, list[Delta]]:
        """Returns ``(accepted, deltas)``: ids behind a stop string are not accepted."""
        if not self._one_by_one:
            return len(ids), self._feed(ids)
        deltas: list[Delta] = []
        for count, token in enumerate(ids, 1):
            deltas += self._feed((token,))
            if self._scanner.matched is not None:
                return count, deltas
        return len(ids), deltas

    def finish(self, *, ended: bool) -> list[Delta]:
        """The last deltas. ``ended``: by the model or a stop string, not by its token limit."""
        shown = self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush()
        parts = self._parser.feed(shown) + self._parser.finish(ended=ended)
        return self._deltas(parts)

    def message(self) -> Message:
        """The answer so far as a canonical message."""
        return Message("assistant", "".join(self._text), tool_calls=tuple(self._calls))

    def finish_reason(self, *, ended: bool) -> FinishReason:
        """``tool_calls`` only if there is one."""
        if not ended:
            return "length"
        return "tool_calls" if self._calls else "stop"

    def _feed(self, ids: Sequence[int]) -> list[Delta]:
        self._tokens += len(ids)
        text = self._detokenizer.feed([token for token in ids if token not in self._silent])
        shown = self._scanner.feed(text)
        return self._deltas(self._parser.feed(shown)) if shown else []

    def _deltas(self, parts: list[Part]) -> list[Delta]:
        deltas = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(part)
                deltas.append(Delta("", part, self._tokens))
            else:
                self._text.append(part)
                deltas.append(Delta(part, None, self._tokens))
        return deltas
