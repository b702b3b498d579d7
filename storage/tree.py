"""The token tree of one group: spans, generations, sessions, and the rules they keep.

Ids are what the engine read and wrote (I1); log-probs are float32, bit for bit
as recorded; weight versions are run-length encoded. A prompt span may be shared
by sessions, a completion span belongs to exactly one generation (I2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.errors import IntegrityError

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]

ROOT = -1
"""Parent of a root span."""

UNKNOWN_VERSION = -1
"""Version of a token whose weights are not known: context for others, never in a loss."""


@dataclass(frozen=True, eq=False)
class Span:
    """A run of tokens with one parent and one kind.

    ``parent`` is the index of an earlier span or :data:`ROOT`. For a completion,
    ``logprobs`` has one value per id and ``versions`` is (values int32[k],
    lengths int32[k]) with lengths that sum to the number of ids; for a prompt
    all of these are empty and ``generation`` is "".
    """

    parent: int
    kind: Literal["prompt", "completion"]
    ids: Ids
    logprobs: Logprobs
    versions: tuple[Ids, Ids]
    generation: str

    def __eq__(self, other: object) -> bool:
        """Equal in every token and every bit of every log-prob."""
        if not isinstance(other, Span):
            return NotImplemented
        mine, theirs = (
            (s.parent, s.kind, s.generation, *(a.tobytes() for a in (s.ids, s.logprobs, *s.versions)))
            for s in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    def token_versions(self) -> Ids:
        """Weight version of each token, int32[n]; empty for a prompt."""
        values, lengths = self.versions
        return np.repeat(values, lengths)


@dataclass(frozen=True)
class Generation:
    """What the engines produced for one choice of one turn; ``spans`` are its completion spans in order.

    ``segments`` say which engine made which of its tokens: ``{"node", "engine", "start", "end"}``.
    """

    id: str
    session: str
    turn: int
    choice: int
    spans: tuple[int, ...]
    finish_reason: str
    temperature: float
    top_p: float
    trainable: bool
    segments: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class SessionRow:
    """One scored sample of the group; ``leaves`` are the last spans of its trajectories."""

    id: str
    sample: int
    attempt: int
    reward: float
    status: str
    turns: int
    forks: int
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One group of one run."""

    run: str
    stream: str
    ordinal: int
    spans: tuple[Span, ...]
    generations: tuple[Generation, ...]
    sessions: tuple[SessionRow, ...]

    def validate(self) -> None:
        """Raises IntegrityError naming the first thing that breaks the format."""
        for index, span in enumerate(self.spans):
            _check_span(self, index, span)
        _check_generations(self)
        sessions = {row.id for row in self.sessions}
        if len(sessions) != len(self.sessions):
            raise self.error("two sessions have the same id")
        for row in self.sessions:
            if any(not 0 <= leaf < len(self.spans) for leaf in row.leaves):
                raise self.error(f"session {row.id} has leaves {row.leaves}, there are {len(self.spans)} spans")
        for generation in self.generations:
            if generation.session not in sessions:
                raise self.error(f"generation {generation.id} is of session {generation.session}, which is not here")

    def error(self, what: str) -> IntegrityError:
        """An IntegrityError that names this shard."""
        return IntegrityError(f"shard of group {self.run}/{self.stream}/{self.ordinal}: {what}")


@dataclass(frozen=True)
class TreePath:
    """One trajectory: ``spans`` from the root to ``leaf``."""

    session: str
    leaf: int
    spans: tuple[int, ...]


def paths(shard: Shard) -> list[TreePath]:
    """Every trajectory of every session, in the order of sessions and their leaves."""
    return [TreePath(row.id, leaf, path_to(shard, leaf)) for row in shard.sessions for leaf in row.leaves]


def path_to(shard: Shard, leaf: int) -> tuple[int, ...]:
    """Indices of the spans from the root to ``leaf``, inclusive."""
    path = []
    index = leaf
    while index != ROOT:
        path.append(index)
        index = shard.spans[index].parent
    return tuple(reversed(path))


def _check_span(shard: Shard, index: int, span: Span) -> None:
    where = f"span {index}"
    if not ROOT <= span.parent < index:
        raise shard.error(f"{where} has parent {span.parent}: parents come before their children")
    values, lengths = span.versions
    arrays = {"ids": (span.ids, np.int32), "logprobs": (span.logprobs, np.float32)}
    arrays |= {"version values": (values, np.int32), "version lengths": (lengths, np.int32)}
    for name, (array, dtype) in arrays.items():
        if array.dtype != dtype or array.ndim != 1:
            raise shard.error(f"{where} has {name} of {array.dtype}{array.shape}: must be one row of {np.dtype(dtype)}")
    if span.kind == "prompt":
        if len(span.logprobs) or len(values) or len(lengths) or span.generation:
            raise shard.error(f"{where} is a prompt, but has log-probs, versions or a generation")
        return
    if span.kind != "completion":
        raise shard.error(f"{where} has kind {span.kind!r}")
    if len(span.logprobs) != len(span.ids):
        raise shard.error(f"{where} has {len(span.ids)} ids and {len(span.logprobs)} log-probs")
    if not np.isfinite(span.logprobs).all():
        raise shard.error(f"{where} has a log-prob that is not finite")
    if len(values) != len(lengths) or int(lengths.sum()) != len(span.ids) or (lengths <= 0).any():
        raise shard.error(f"{where} has versions of {int(lengths.sum())} tokens and {len(span.ids)} ids")


def _check_generations(shard: Shard) -> None:
    owner: dict[int, str] = {}
    for generation in shard.generations:
        for index in generation.spans:
            if not 0 <= index < len(shard.spans) or shard.spans[index].generation != generation.id:
                raise shard.error(f"generation {generation.id} claims span {index}, which is not its own")
            if owner.setdefault(index, generation.id) != generation.id:
                raise shard.error(f"span {index} is of generations {owner[index]} and {generation.id}")
    if len({generation.id for generation in shard.generations}) != len(shard.generations):
        raise shard.error("two generations have the same id")
    for index, span in enumerate(shard.spans):
        if span.kind == "completion" and index not in owner:
            raise shard.error(f"completion span {index} belongs to no generation")
