"""From shards to trajectories: what a forward pass reads and which of its tokens are trained. numpy only.

A trajectory is one root-to-leaf path of a session's tree. Trajectories share spans, so each completion token is marked
as trained in the first one that holds it and is context in the others: it enters the loss once however many leaves
share it. Tokens without a known weight version, and generations marked as not trainable, are context too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from storage.shards import SessionRow, Shard, path_to

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Segment:
    """One span on a trajectory.

    *Example* ``key=(17, 4), ids=[7, 2, 9], trained=[0, 1]``: span 4 of task 17; its last token is context.
    """

    key: tuple[int, int]
    """Task and span: equal keys on two trajectories are the same tokens behind the same tokens."""
    ids: Ints
    trained: Ints
    """Indices into ``ids``, ascending; empty for a prompt."""
    engine_logprobs: Floats
    """Per trained token, as recorded at sampling."""
    versions: Ints
    """Per trained token, the weight version that made it."""


@dataclass(frozen=True)
class Trajectory:
    """One leaf path, cut behind the last span with a trained token."""

    session: str
    segments: tuple[Segment, ...]
    turns: Ints
    """Per trained token, its generation, counted over the trained ones of the group."""
    parents: Ints
    """Per trained token, the trained token in front of it on the path, counted over those of the group; -1 for none.
    Where trajectories part, it may be one of an earlier trajectory."""

    @property
    def engine_logprobs(self) -> Floats:
        """Per trained token, as recorded at sampling."""
        return np.concatenate([segment.engine_logprobs for segment in self.segments])

    @property
    def versions(self) -> Ints:
        """Per trained token, the weight version that made it."""
        return np.concatenate([segment.versions for segment in self.segments])

    @cached_property
    def ids(self) -> Ints:
        return np.concatenate([segment.ids for segment in self.segments])

    @cached_property
    def trained_at(self) -> npt.NDArray[np.int64]:
        """Indices into :attr:`ids` of the trained tokens, ascending."""
        starts = np.cumsum([0, *(len(segment.ids) for segment in self.segments)])
        return np.concatenate([start + s.trained for start, s in zip(starts[:-1], self.segments, strict=True)])

    @property
    def inputs(self) -> Ints:
        """What a forward pass reads: all in front of the last trained token, which is only predicted."""
        return self.ids[: self.trained_at[-1]]

    @property
    def trained(self) -> int:
        """How many of its tokens are trained."""
        return sum(len(segment.trained) for segment in self.segments)


@dataclass(frozen=True)
class GroupRows:
    """The trajectories of one shard."""

    rewards: Mapping[str, float]
    """Per session that counts in the group's statistics, in the shard's order."""
    trajectories: tuple[Trajectory, ...]
    masked: int
    """Completion tokens that stay context."""


def group_rows(shard: Shard, sessions: Sequence[str], *, oldest: int = 0) -> GroupRows:
    """The trajectories of those ``sessions`` of a shard that train at least one token, in the shard's order.

    Tokens of weight versions before ``oldest`` are context.

    Raises :class:`IntegrityError` if the shard lacks a session or contradicts itself.
    """
    wanted = set(sessions)
    if missing := sorted(wanted - {session.id for session in shard.sessions}):
        raise shard.error(f"it lacks session {missing[0]}, which the manifest trains: they do not belong together")
    walker = _Walker(shard, max(oldest, 0))
    rows = [row for session in shard.sessions if session.id in wanted for row in walker.trajectories(session)]
    rewards = {session.id: session.reward for session in shard.sessions if session.id in wanted}
    return GroupRows(rewards=rewards, trajectories=tuple(rows), masked=walker.masked)


class _Walker:
    """Walks leaf paths and remembers which completion spans are already on a trajectory."""

    def __init__(self, shard: Shard, oldest: int) -> None:
        self._shard = shard
        self._oldest = oldest
        self._generations = {generation.id: generation for generation in shard.generations}
        self._seen: set[int] = set()
        self._turns: dict[str, int] = {}
        self._last: dict[int, int] = {}
        """Of each span, the last trained token in it or in front of it."""
        self._tokens = 0
        self.masked = 0

    def trajectories(self, session: SessionRow) -> list[Trajectory]:
        found = []
        for leaf in session.leaves:
            spans = path_to(self._shard, leaf)
            segments = [self._segment(session, index) for index in spans]
            turns, parents = self._lineage(spans, [len(segment.trained) for segment in segments])
            # What follows the last trained token cannot change its log-prob: computing it would be waste.
            while segments and not len(segments[-1].trained):
                segments.pop()
            if segments:
                found.append(Trajectory(session.id, tuple(segments), turns, parents))
                if found[-1].trained_at[0] == 0:
                    raise self._shard.error(f"session {session.id} has a completion without a prompt, leaf {leaf}")
        return found

    def _lineage(self, spans: Sequence[int], trained: Sequence[int]) -> tuple[Ints, Ints]:
        """Turns and parents of a path's trained tokens; ``trained`` says how many each span has."""
        turns: list[int] = []
        parents: list[int] = []
        above = -1
        for index, count in zip(spans, trained, strict=True):
            if count:
                turn = self._turns.setdefault(self._shard.spans[index].generation, len(self._turns))
                turns += [turn] * count
                parents += [above, *range(self._tokens, self._tokens + count - 1)]
                self._tokens += count
                above = self._tokens - 1
            else:
                above = self._last.get(index, above)
            self._last[index] = above
        return np.array(turns, np.int32), np.array(parents, np.int32)

    def _segment(self, session: SessionRow, index: int) -> Segment:
        span = self._shard.spans[index]
        key = (self._shard.ordinal, index)
        if span.kind == "prompt" or index in self._seen:
            return Segment(key, span.ids, _NO_INTS, _NO_FLOATS, _NO_INTS)
        self._seen.add(index)
        versions = span.token_versions()
        keep = (versions >= self._oldest) & self._trainable(session, index)
        self.masked += int((~keep).sum())
        return Segment(key, span.ids, np.flatnonzero(keep).astype(np.int32), span.logprobs[keep], versions[keep])

    def _trainable(self, session: SessionRow, index: int) -> bool:
        span = self._shard.spans[index]
        generation = self._generations.get(span.generation)
        if generation is None or generation.session != session.id:
            raise self._shard.error(
                f"session {session.id} passes through completion span {index} of generation {span.generation!r}, "
                "which is not one of its own"
            )
        return generation.trainable


_NO_INTS: Ints = np.empty(0, np.int32)
_NO_FLOATS: Floats = np.empty(0, np.float32)
