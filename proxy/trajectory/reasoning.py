"""Reasoning in generated text, told apart from the answer as it streams.

Reasoning is one block at the beginning of an answer. The template may have
opened it in the prompt; then the model writes only the closing mark. A block
that is never closed is reasoning to the end.

``think``: line breaks at the edges of the reasoning and in front of the answer
are left out, as templates of that kind put them there themselves. ``mistral``:
every character counts. So an answer that is rendered again gets the ids it had
wherever its template does not rewrite it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.trajectory.detokenizer import overlap
from storage.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of reasoning; its marks are left out."""

    text: str


MARKS: dict[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Kind -> text that opens and text that closes a block of reasoning."""


def opened(kind: str, prompt_end: str) -> bool:
    """Whether a prompt that ends with ``prompt_end`` leaves the model inside a block of reasoning."""
    return kind in MARKS and prompt_end.rstrip().endswith(MARKS[kind][0])


class ReasoningParser(Protocol):
    """Reads one answer's text; what is a plain string belongs to the answer."""

    def feed(self, text: str) -> list[str | Reasoning]:
        """What became certain with ``text``."""
        ...

    def finish(self) -> list[str | Reasoning]:
        """The rest."""
        ...


class NoReasoning:
    """Everything is answer."""

    def feed(self, text: str) -> list[str | Reasoning]:
        return [text]

    def finish(self) -> list[str | Reasoning]:
        return []


class BlockReasoning:
    """One block between ``opening`` and ``closing`` in front of the answer; ``trim`` the line breaks around it."""

    def __init__(self, opening: str, closing: str, *, opened: bool, trim: bool) -> None:
        self._opening, self._closing = opening, closing
        self._trimmed = "\n" if trim else ""
        self._buffer = ""
        self._state = "thought" if opened else "start"  # then "gap", then "answer"
        self._begun = False

    def feed(self, text: str) -> list[str | Reasoning]:
        self._buffer += text
        pieces: list[str | Reasoning] = []
        if self._state == "start":
            self._start()
        if self._state == "thought":
            self._think(pieces)
        if self._state == "gap":
            self._skip_gap()
        if self._state == "answer" and self._buffer:
            pieces.append(self._buffer)
            self._buffer = ""
        return pieces

    def finish(self) -> list[str | Reasoning]:
        rest, self._buffer = self._buffer, ""
        if self._state == "thought":
            rest = rest.strip(self._trimmed) if not self._begun else rest.rstrip(self._trimmed)
            return [Reasoning(rest)] if rest else []
        return [rest] if rest and self._state == "start" else []

    def _start(self) -> None:
        """Decide whether the answer begins with reasoning; a closing mark alone ends reasoning that was empty."""
        text = self._buffer.lstrip()
        if text.startswith(self._opening):
            self._buffer, self._state = text.removeprefix(self._opening), "thought"
        elif text.startswith(self._closing):
            self._buffer, self._state = text.removeprefix(self._closing), "gap"
        elif not self._opening.startswith(text) and not self._closing.startswith(text):
            self._state = "answer"

    def _think(self, pieces: list[str | Reasoning]) -> None:
        if not self._begun:
            self._buffer = self._buffer.lstrip(self._trimmed)
        end = self._buffer.find(self._closing)
        cut = end if end >= 0 else len(self._buffer) - overlap(self._buffer, (self._closing,))
        thought = self._buffer[:cut].rstrip(self._trimmed)
        if thought:
            pieces.append(Reasoning(thought))
            self._begun = True
        if end >= 0:
            self._buffer = self._buffer[end + len(self._closing) :]
            self._state = "gap"
        else:
            self._buffer = self._buffer[len(thought) :]

    def _skip_gap(self) -> None:
        self._buffer = self._buffer.lstrip(self._trimmed)
        if self._buffer:
            self._state = "answer"


def reasoning_factory(kind: str) -> Callable[[bool], ReasoningParser]:
    """The parser of ``model.reasoning_parser``; its argument: the prompt ended inside a block of reasoning.

    Raises ConfigError for a kind that does not exist.
    """
    if kind == "none":
        return lambda opened: NoReasoning()
    if kind not in MARKS:
        raise ConfigError(f"model.reasoning_parser {kind!r} does not exist: none or {', '.join(MARKS)}")
    opening, closing = MARKS[kind]
    return lambda opened: BlockReasoning(opening, closing, opened=opened, trim=kind == "think")
