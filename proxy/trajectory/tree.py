"""Radix tree of token spans: one session's (or one group's) trajectories, shared prefixes stored once.

A span is a run of tokens that share a parent and a kind. ``prompt`` spans are
what an engine read; ``completion`` spans are what it wrote, with one
log-probability and one weight version per token. Equal prompts share spans;
a completion is never merged with another, even with equal ids, because two
generations are two samples. A later prompt may run *through* a completion when
its ids are the same: that is how the turns of one session become one path.

An index is stable: splitting a span puts the new front part under a new index
and leaves the tail where it was, so whoever remembers the end of a path still
has it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
SpanKind = Literal["prompt", "completion"]

ROOT = -1
"""Parent of first spans."""
UNKNOWN_VERSION = -1
"""Version of a token for which there is no evidence: context, never trained."""

_NO_IDS: Ids = np.empty(0, np.int32)
_NO_FLOATS: Floats = np.empty(0, np.float32)


@dataclass(slots=True)
class Span:
    """``ids`` int32[n]; ``logprobs`` float32[n] and ``versions`` int32[n] for completions, empty for prompts.

    Example: ``Span(parent=0, kind="completion", ids=[5, 2], logprobs=[-.1, -.7], versions=[3, 3], generation="g1")``.
    """

    parent: int
    kind: SpanKind
    ids: Ids
    logprobs: Floats = field(default_factory=lambda: _NO_FLOATS)
    versions: Ids = field(default_factory=lambda: _NO_IDS)
    generation: str = ""
    depth: int = 0
    """Tokens from the root to the end of this span."""
    passable: bool = False
    """Completions only: whether a prompt may run through it (its generation ended by itself)."""
    children: dict[int, list[int]] = field(default_factory=dict)
    """First token -> indices of child spans that begin with it."""
    text: bytes = b""
    """``ids`` in JSON, without brackets; empty until it is asked for."""


class Tree:
    """See the module. All positions are span indices; :data:`ROOT` is the empty path."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.size = 0
        """Stored tokens of both kinds."""
        self._top: dict[int, list[int]] = {}

    def insert_prompt(self, ids: Ids, after: int = ROOT, *, through_completions: bool = True) -> tuple[int, int]:
        """Add a prompt below ``after`` by longest-prefix match.

        Returns ``(end, matched)``: the index where the path of all ``ids`` ends
        and how many of them were there already. ``through_completions`` False
        matches prompt spans only (samples of a group never share completions).
        """
        at, whole, partial, matched = self._match(ids, after, through_completions)
        if matched > whole:
            at = self._split(partial, matched - whole)
        if matched < len(ids):
            at = self._add(Span(at, "prompt", np.ascontiguousarray(ids[matched:], np.int32)))
        return at, matched

    def matched(self, ids: Ids, after: int) -> int:
        """How many tokens of a prompt below ``after`` are stored already."""
        return self._match(ids, after, through_completions=True)[3]

    def append_completion(
        self, after: int, generation: str, ids: Ids, logprobs: Floats, versions: Ids, *, passable: bool
    ) -> int:
        """Add a generation's tokens below ``after``; returns the index of the new span.

        Nothing is merged. A generation without tokens adds nothing and returns
        ``after``: an empty answer is no parent of anything.
        """
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"generation {generation}: {len(ids)} ids, {len(logprobs)} log-probs, {len(versions)} versions"
            )
        if not len(ids):
            return after
        span = Span(
            after,
            "completion",
            np.ascontiguousarray(ids, np.int32),
            np.ascontiguousarray(logprobs, np.float32),
            np.ascontiguousarray(versions, np.int32),
            generation,
            passable=passable,
        )
        return self._add(span)

    def path(self, end: int) -> list[int]:
        """Span indices from the root to ``end``."""
        indices = []
        while end != ROOT:
            indices.append(end)
            end = self.spans[end].parent
        indices.reverse()
        return indices

    def path_ids(self, end: int) -> Ids:
        """All token ids from the root to the end of span ``end``."""
        parts = [self.spans[index].ids for index in self.path(end)]
        return np.concatenate(parts) if parts else _NO_IDS

    def path_json(self, end: int) -> bytes:
        """:meth:`path_ids` as a JSON array. Each span is written once, however many prompts begin with it."""
        parts = []
        for index in self.path(end):
            span = self.spans[index]
            if not span.text:
                span.text = orjson.dumps(span.ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            parts.append(span.text)
        return b"[%b]" % b",".join(parts)

    def depth(self, end: int) -> int:
        """Tokens on the path to ``end``."""
        return 0 if end == ROOT else self.spans[end].depth

    def generation_spans(self, end: int) -> tuple[int, ...]:
        """The spans of the generation that ends at completion span ``end``, in order."""
        generation = self.spans[end].generation
        indices = []
        while end != ROOT and self.spans[end].kind == "completion" and self.spans[end].generation == generation:
            indices.append(end)
            end = self.spans[end].parent
        return tuple(reversed(indices))

    def sampled(self) -> set[int]:
        """Spans on a path to a completion; what is left out are prompts that were never answered."""
        found: set[int] = set()
        for index, span in enumerate(self.spans):
            if span.kind == "completion":
                while index != ROOT and index not in found:
                    found.add(index)
                    index = self.spans[index].parent
        return found

    def preorder(self) -> Iterator[int]:
        """Indices, parents before children."""
        pending = [index for indices in reversed(self._top.values()) for index in reversed(indices)]
        while pending:
            index = pending.pop()
            yield index
            for indices in reversed(self.spans[index].children.values()):
                pending.extend(reversed(indices))

    def tokens(self, kind: SpanKind) -> int:
        """Stored tokens of ``kind``."""
        return sum(len(span.ids) for span in self.spans if span.kind == kind)

    def _children(self, index: int) -> dict[int, list[int]]:
        return self._top if index == ROOT else self.spans[index].children

    def _match(self, ids: Ids, after: int, through_completions: bool) -> tuple[int, int, int, int]:
        """Longest match of ``ids`` below ``after``.

        Returns (last span matched whole, tokens up to its end, span matched in part, tokens matched in all).
        """
        best = (after, 0, ROOT, 0)
        pending = [(after, 0)]
        while pending:
            at, position = pending.pop()
            if position > best[3]:
                best = (at, position, ROOT, position)
            if position == len(ids):
                break
            for index in self._children(at).get(int(ids[position]), ()):
                span = self.spans[index]
                if span.kind == "completion" and not (through_completions and span.passable):
                    continue
                common = _common_prefix(span.ids, ids[position:])
                if common == len(span.ids):
                    pending.append((index, position + common))
                elif position + common > best[3]:
                    best = (at, position, index, position + common)
        return best

    def _split(self, index: int, at: int) -> int:
        """Cut span ``index`` before its token ``at``; returns the index of the new front part."""
        tail = self.spans[index]
        front = Span(
            tail.parent,
            tail.kind,
            tail.ids[:at],
            tail.logprobs[:at],
            tail.versions[:at],
            tail.generation,
            tail.depth - len(tail.ids) + at,
            tail.passable,
        )
        self.spans.append(front)
        new = len(self.spans) - 1
        siblings = self._children(tail.parent)[int(tail.ids[0])]
        siblings[siblings.index(index)] = new
        tail.ids, tail.logprobs, tail.versions = tail.ids[at:], tail.logprobs[at:], tail.versions[at:]
        tail.parent, tail.text = new, b""
        front.children[int(tail.ids[0])] = [index]
        return new

    def _add(self, span: Span) -> int:
        span.depth = self.depth(span.parent) + len(span.ids)
        self.spans.append(span)
        self.size += len(span.ids)
        index = len(self.spans) - 1
        self._children(span.parent).setdefault(int(span.ids[0]), []).append(index)
        return index


def merge_into(group: Tree, session: Tree, keep: Container[int]) -> dict[int, int]:
    """Add the spans ``keep`` of ``session`` to ``group``: prompts shared, completions kept apart.

    ``keep`` holds whole paths. Returns session span index -> group span index of
    the same path's end.
    """
    moved: dict[int, int] = {ROOT: ROOT}
    for index in session.preorder():
        if index not in keep:
            continue
        span = session.spans[index]
        parent = moved[span.parent]
        if span.kind == "prompt":
            moved[index], _ = group.insert_prompt(span.ids, parent, through_completions=False)
        else:
            moved[index] = group.append_completion(
                parent, span.generation, span.ids, span.logprobs, span.versions, passable=span.passable
            )
    del moved[ROOT]
    return moved


def run_lengths(values: Sequence[int] | Ids) -> tuple[Ids, Ids]:
    """Run-length encode: ``[7, 7, 8] -> ([7, 8], [2, 1])``."""
    array = np.asarray(values, np.int32)
    if not len(array):
        return _NO_IDS, _NO_IDS
    starts = np.flatnonzero(np.concatenate(([True], array[1:] != array[:-1])))
    return array[starts], np.diff(np.append(starts, len(array))).astype(np.int32)


def _common_prefix(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
