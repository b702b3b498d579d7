"""What one generation produced, token by token, over all its segments.

A segment is the part that one engine made in one request. Evidence for a
token's weight version is either the engine's final span list (exact), or a
label that equals the version the segment started with: versions only grow, so
such a token cannot have been made by another. A label that changed on the way
leaves its tokens unknown until a span list settles them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.trajectory.tree import UNKNOWN_VERSION, run_lengths

Marks = list[list[int]]
"""Run-length encoded versions, as journalled: ``[[version, tokens], ...]``."""


@dataclass(slots=True)
class Segment:
    """``start`` is the generation's token count when the segment began, ``version`` the weights it started under."""

    number: int
    node: str
    lease: str
    engine: str
    rid: str
    """Request id at the engine."""
    epoch: int
    version: int
    seed: int | None
    start: int
    end: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Recording:
    """``ids``, ``logprobs`` and ``versions`` are aligned; -1 is an unknown version."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: dict[int, list[list[float]]] = field(default_factory=dict)
    """Position -> ``[[token, logprob], ...]``, the likeliest tokens there; only if the agent asked for them."""
    segments: list[Segment] = field(default_factory=list)
    batches: array[int] = field(default_factory=lambda: array("I"))
    """How many tokens came at a time: told again in the same portions, an answer has the same bytes."""
    conflicts: int = 0
    """Span lists that contradicted an exact mark; their segments' tokens are unknown."""

    def begin(self, segment: Segment) -> None:
        self.segments.append(segment)

    def marks(self, tokens: int, label: int | None) -> Marks:
        """Versions of the next ``tokens`` tokens, given the engine's label for them."""
        exact = label is not None and label == self.segments[-1].version
        return [[label if exact and label is not None else UNKNOWN_VERSION, tokens]]

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        marks: Iterable[Sequence[int]],
        tops: Sequence[list[list[float]]] = (),
    ) -> None:
        """Append tokens to the current segment."""
        versions: list[int] = []
        for version, count in marks:
            versions += [version] * count
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(ids)} ids, {len(logprobs)} log-probs, {len(versions)} versions")
        self.tops.update(enumerate(tops, len(self.ids)))
        if ids:
            self.batches.append(len(ids))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.segments[-1].end = len(self.ids)

    def portions(self) -> Iterator[list[int]]:
        """All ids, as they came."""
        start = 0
        for count in self.batches:
            yield self.ids[start : start + count]
            start += count

    def amend(self, spans: Iterable[Sequence[int | None]]) -> None:
        """Settle the current segment by ``(version, start, end)`` over its own tokens; they may reach past its end."""
        segment = self.segments[-1]
        length = segment.end - segment.start
        settled = [UNKNOWN_VERSION] * length
        for version, start, end in spans:
            first, stop = start or 0, min(end or 0, length)
            if version is not None and first < stop:
                settled[first:stop] = [version] * (stop - first)
        before = self.versions[segment.start : segment.end]
        if settled != before and any(
            old not in (UNKNOWN_VERSION, new) for old, new in zip(before, settled, strict=True)
        ):
            self.conflicts += 1
            settled = [UNKNOWN_VERSION] * length
        self.versions[segment.start : segment.end] = settled

    def version_runs(self) -> Marks:
        """All versions, run-length encoded."""
        values, lengths = run_lengths(self.versions)
        return [[int(value), int(length)] for value, length in zip(values, lengths, strict=True)]
