"""What tool-call parsers share: the protocol, blocks between marks in text that comes in parts, exact JSON.

Reading is monotone: what is decided about a block depends only on text up to
the decision. That is why splitting the text elsewhere gives the same result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

from proxy.trajectory.canonical import ToolCall
from proxy.trajectory.detokenizer import overlap

Part = str | ToolCall
Tools = Sequence[dict[str, Any]]


class ToolParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """What became certain with ``text``."""
        ...

    def finish(self, *, ended: bool) -> list[Part]:
        """The rest. ``ended``: the model ended its answer by itself, it was not cut."""
        ...

    def forced_prefix(self, name: str | None) -> str | None:
        """Text at the end of a prompt after which the model writes a call of ``name`` (None: of any tool).

        None: a call cannot be forced. The parser is fed this text in front of the answer.
        """
        ...


ParserFactory = Callable[[Tools], ToolParser]


class NoParser:
    """Everything is text."""

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self, *, ended: bool) -> list[Part]:
        return []

    def forced_prefix(self, name: str | None) -> str | None:
        return None


class Undecided(Exception):
    """The text does not reach far enough to say what a block is."""


class Malformed(Exception):
    """What begins like a block is none."""


class Block(NamedTuple):
    """The buffer up to ``end`` is read: it is ``calls`` (none: a mark without meaning), or text if that is None."""

    end: int
    calls: tuple[ToolCall, ...] | None


class BlockParser:
    """Calls in blocks that begin with an opening mark; text around them is kept, white space around them is not.

    Where a block is malformed or never ends, its mark is text and reading goes on behind it. A subclass implements
    :meth:`_read` and :meth:`forced_prefix`.
    """

    openings: ClassVar[tuple[str, ...]]
    """Marks that begin a block."""
    marks: ClassVar[tuple[str, ...]]
    """All marks of the family."""

    def __init__(self, tools: Tools) -> None:
        self.names = {function.get("name") for function in functions(tools)}
        self._search = _any_of(self.openings).search
        self._buffer = ""
        self._space = ""  # in front of a call it means nothing, in front of text it does
        self._called = False
        self._mark = 0  # length of the mark that the buffer begins with while a block is being read
        self._json: JsonEnd | None = None

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._scan(last=False)

    def finish(self, *, ended: bool) -> list[Part]:
        parts = self._scan(last=True)
        if self._space and not self._called:
            parts.append(self._space)
        self._space = ""
        return parts

    def forced_prefix(self, name: str | None) -> str | None:
        """See :class:`ToolParser`."""
        raise NotImplementedError

    def _read(self) -> Block:
        """The block that the buffer begins with. Raises Undecided, Malformed."""
        raise NotImplementedError

    def _next(self, *, last: bool) -> tuple[int, int]:
        """(length of the text in front of the next block, length of the block's opening mark; 0: none yet)."""
        found = self._search(self._buffer)
        if found is not None:
            return found.start(), len(found[0])
        return len(self._buffer) - (0 if last else overlap(self._buffer, self.openings)), 0

    def _scan(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if not self._mark:
                text, self._mark = self._next(last=last)
                self._text(parts, text)
                if not self._mark:
                    return parts
                self._json = None
            try:
                block = self._read()
            except Undecided:
                if not last:
                    return parts
                block = Block(self._mark, None)
            except Malformed:
                block = Block(self._mark, None)
            self._mark = 0
            if block.calls is None:
                self._text(parts, block.end)
                continue
            self._buffer = self._buffer[block.end :]
            if block.calls:
                self._space, self._called = "", True
                parts += block.calls

    def _text(self, parts: list[Part], end: int) -> None:
        """The buffer up to ``end`` is text; trailing white space waits for what follows it."""
        text, self._buffer = self._space + self._buffer[:end], self._buffer[end:]
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            parts.append(body)

    def _skip_space(self, at: int) -> int:
        """Index of the first character from ``at`` on that is no white space. Raises Undecided if there is none yet."""
        at = skip_space(self._buffer, at)
        if at == len(self._buffer):
            raise Undecided
        return at

    def _skip(self, at: int, mark: str) -> int:
        """Index behind ``mark``, which must stand at ``at``. Raises Undecided, Malformed."""
        if self._buffer.startswith(mark, at):
            return at + len(mark)
        raise Undecided if mark.startswith(self._buffer[at:]) else Malformed

    def _value_end(self, start: int) -> int:
        """Index behind the JSON object or array at ``start``. Raises Undecided, Malformed."""
        if self._buffer[start] not in "{[":
            raise Malformed
        if self._json is None:
            self._json = JsonEnd(start)
        end = self._json.find(self._buffer)
        if end is None:
            raise Undecided
        if end < 0:
            raise Malformed
        return end

    def _call(self, name: str, arguments: str) -> tuple[ToolCall, ...] | None:
        valid = name in self.names and isinstance(json_value(arguments), dict)
        return (ToolCall(name, arguments),) if valid else None


_STRING_REST = re.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+', re.DOTALL)
_PLAIN_REST = re.compile(r"[\s\w,:.+-]*+")


class JsonEnd:
    """Finds the end of one JSON object or array in text that grows, looking at each character once."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._string = False
        self._found: int | None = None

    def find(self, text: str) -> int | None:
        """Index behind the value; -1: it can be no JSON; None: it goes on behind ``text``."""
        while self._found is None:
            rest = (_STRING_REST if self._string else _PLAIN_REST).match(text, self._at)
            self._at = rest.end() if rest else self._at
            if self._at == len(text) or (self._string and text[self._at :] == "\\"):
                return None
            self._step(text[self._at])
            self._at += 1
        return self._found

    def _step(self, char: str) -> None:
        if char == '"':
            self._string = not self._string
        elif self._string:
            self._found = -1
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._found = self._at + 1
        else:
            self._found = -1


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in marks))


def functions(tools: Tools) -> list[dict[str, Any]]:
    """The function of each tool."""
    return [function for tool in tools if isinstance(function := tool.get("function"), dict)]


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def skip_space(text: str, at: int) -> int:
    """Index of the first character from ``at`` on that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def json_value(text: str) -> Any:
    """The JSON value ``text``; None if it is no JSON (NaN is none)."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # also an integer with more digits than Python reads
        return None


def object_fields(text: str) -> dict[str, str] | None:
    """Key -> exact source text of its value; None if ``text`` is no JSON object."""
    if not isinstance(json_value(text), dict):
        return None
    fields: dict[str, str] = {}
    at = 1
    while True:
        at = skip_space(text, at)
        if text[at] == "}":
            return fields
        if text[at] == ",":
            at = skip_space(text, at + 1)
        key, at = _DECODER.raw_decode(text, at)
        start = skip_space(text, skip_space(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        fields[key] = text[start:at]


def array_items(text: str) -> list[str] | None:
    """Exact source text of each item; None if ``text`` is no JSON array."""
    if not isinstance(json_value(text), list):
        return None
    items: list[str] = []
    at = 1
    while True:
        at = skip_space(text, at)
        if text[at] == "]":
            return items
        if text[at] == ",":
            at = skip_space(text, at + 1)
        _, end = _DECODER.raw_decode(text, at)
        items.append(text[at:end])
        at = end


def described_call(text: str) -> tuple[str, str] | None:
    """Name and exact arguments of ``{"name": ..., "arguments": {...}}``, or ``parameters``; None if it is none."""
    fields = object_fields(text)
    if fields is None or "name" not in fields:
        return None
    name = json_value(fields["name"])
    arguments = fields.get("arguments", fields.get("parameters", "{}"))
    return (name, arguments) if isinstance(name, str) else None
