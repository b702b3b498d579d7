"""From a generation's ids to what the agent is shown: reasoning, text, tool calls, the reason it ended.

Pure and incremental; feeding the ids in other portions gives the same answer,
which is why an answer can be rebuilt from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.detokenizer import Decode, Detokenizer, StopScanner
from proxy.trajectory.reasoning import Reasoning, ReasoningParser
from proxy.trajectory.toolcalls import ToolParser

FinishReason = Literal["stop", "length", "tool_calls"]


class Delta(NamedTuple):
    """One step of an answer: text, reasoning or one whole call. ``tokens``: ids of the generation seen up to here."""

    text: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    tokens: int = 0


class AnswerBuilder:
    """Builds one answer. ``silent`` ids (end of turn) have no text.

    ``prefix`` is text at the end of the prompt that belongs to the answer (the
    start of a forced call). ``single_call``: the answer ends with its first call.
    """

    def __init__(
        self,
        decode: Decode,
        reasoning: ReasoningParser,
        parser: ToolParser,
        *,
        stops: Sequence[str] = (),
        silent: frozenset[int] = frozenset(),
        prefix: str = "",
        single_call: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stops)
        self._single_call = single_call
        self._one_by_one = bool(stops) or single_call
        self._reasoning = reasoning
        self._parser = parser
        self._silent = silent
        self._tokens = 0
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._prefix_deltas = self._read(prefix) if prefix else []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, once it has."""
        return self._scanner.matched

    @property
    def over(self) -> bool:
        """The answer has ended before the model did."""
        return self._scanner.matched is not None or (self._single_call and bool(self._calls))

    def feed(self, ids: Sequence[int]) -> tuple[int, list[Delta]]:
        """Returns ``(accepted, deltas)``: ids behind the end of the answer are not accepted."""
        deltas, self._prefix_deltas = self._prefix_deltas, []
        if not self._one_by_one:
            return len(ids), deltas + self._feed(ids)
        for count, token in enumerate(ids, 1):
            deltas += self._feed((token,))
            if self.over:
                return count, deltas
        return len(ids), deltas

    def finish(self, *, ended: bool) -> list[Delta]:
        """The last deltas. ``ended``: by the model or a stop string, not by its token limit."""
        deltas = self._read(self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush())
        for piece in self._reasoning.finish():
            deltas += self._piece(piece)
        for part in self._parser.finish(ended=ended):
            deltas.append(self._part(part))
        return deltas

    def message(self) -> Message:
        """The answer so far as a canonical message."""
        return Message("assistant", "".join(self._text), "".join(self._thoughts), tuple(self._calls))

    def finish_reason(self, *, ended: bool) -> FinishReason:
        """``tool_calls`` only if there is one."""
        if not ended:
            return "length"
        return "tool_calls" if self._calls else "stop"

    def _feed(self, ids: Sequence[int]) -> list[Delta]:
        self._tokens += len(ids)
        text = self._detokenizer.feed([token for token in ids if token not in self._silent])
        return self._read(self._scanner.feed(text)) if text else []

    def _read(self, text: str) -> list[Delta]:
        if not text:
            return []
        return [delta for piece in self._reasoning.feed(text) for delta in self._piece(piece)]

    def _piece(self, piece: str | Reasoning) -> list[Delta]:
        if isinstance(piece, Reasoning):
            self._thoughts.append(piece.text)
            return [Delta(reasoning=piece.text, tokens=self._tokens)]
        return [self._part(part) for part in self._parser.feed(piece)]

    def _part(self, part: str | ToolCall) -> Delta:
        if isinstance(part, ToolCall):
            self._calls.append(part)
            return Delta(call=part, tokens=self._tokens)
        self._text.append(part)
        return Delta(text=part, tokens=self._tokens)
