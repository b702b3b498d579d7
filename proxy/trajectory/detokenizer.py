"""From ids to text as they come: never half a character, and the parts add up to the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

_PREFIX = 8
"""Tokens that are enough to know the text of the next one by, if they begin with a whole character."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes one generation incrementally; the ids are never changed.

    A token's text may depend on the token before it (leading spaces, bytes of
    one character), so new text is the difference between two decodings that
    share a short prefix of tokens already shown.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became certain with ``ids``; empty while a character is incomplete."""
        self._ids.extend(ids)
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._shown = self._next_prefix(), len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """Rest at the end of the generation; an incomplete character becomes one U+FFFD."""
        if self._shown == len(self._ids):
            return ""
        before, after = self._texts()
        self._prefix = self._shown = len(self._ids)
        rest = after[len(before) :]
        stripped = rest.rstrip(_INCOMPLETE)
        return rest if stripped == rest else stripped + _INCOMPLETE

    def _next_prefix(self) -> int:
        """Some decoders give up all bytes in a row for one that is missing, so a prefix begins with a whole character.
        What was shown last does."""
        short = len(self._ids) - _PREFIX
        if short <= self._shown or _INCOMPLETE in self._decode(self._ids[short:]):
            return self._shown
        return short

    def _texts(self) -> tuple[str, str]:
        """Of the tokens from the prefix on: the text that was shown, and all of it."""
        before = self._decode(self._ids[self._prefix : self._shown]) if self._shown > self._prefix else ""
        return before, self._decode(self._ids[self._prefix :])


class StopScanner:
    """Finds stop strings in text that comes in parts, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown. Once :attr:`matched` is set there is no more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        cut = len(self._held) - overlap(self._held, self._stops)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``marks`` without being all of it."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0:
            if mark.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(mark[0], at + 1)
    return longest
