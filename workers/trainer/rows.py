"""From shards to rows: what one forward pass reads and which of its tokens are trained. numpy only.

A row is one root-to-leaf path of a session's tree. Paths of a session share tokens, so each completion token is
marked as trained in the first row that holds it and is context in the others: it enters the loss once however many
leaves share it. Tokens without a known weight version, and generations marked as not trainable, are context too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.shards import SessionRow, Shard, path_to

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One leaf path, cut after its last trained token.

    *Example* ``ids=[5, 9, 7, 2], trained=[2, 3]``: the ids 7 and 2 are trained, predicted at positions 1 and 2.
    """

    session: str
    ids: Ints
    """All tokens of the path."""
    trained: Ints
    """Indices into ``ids``, ascending, each >= 1."""
    engine_logprobs: Floats
    """Per trained token, as recorded at sampling."""
    versions: Ints
    """Per trained token, the weight version that made it."""


@dataclass(frozen=True)
class GroupRows:
    """The rows of one shard."""

    rewards: Mapping[str, float]
    """Per session that counts in the group's statistics, in the shard's order."""
    rows: tuple[Row, ...]
    masked: int
    """Completion tokens that stay context."""


def group_rows(shard: Shard, sessions: Sequence[str]) -> GroupRows:
    """The rows of those ``sessions`` of a shard, in the shard's order.

    Raises :class:`IntegrityError` if the shard lacks a session or contradicts itself.
    """
    wanted = set(sessions)
    if missing := sorted(wanted - {session.id for session in shard.sessions}):
        raise shard.error(f"it lacks session {missing[0]}, which the manifest trains: they do not belong together")
    walker = _Walker(shard)
    rows = tuple(row for session in shard.sessions if session.id in wanted for row in walker.rows(session))
    rewards = {session.id: session.reward for session in shard.sessions if session.id in wanted}
    return GroupRows(rewards=rewards, rows=rows, masked=walker.masked)


class _Walker:
    """Walks leaf paths and remembers which completion spans are already in a row."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._generations = {generation.id: generation for generation in shard.generations}
        self._seen: set[int] = set()
        self.masked = 0

    def rows(self, session: SessionRow) -> list[Row]:
        rows = (self._row(session, leaf) for leaf in session.leaves)
        return [row for row in rows if row is not None]

    def _row(self, session: SessionRow, leaf: int) -> Row | None:
        """None if no token of the path is left to train."""
        ids: list[Ints] = []
        trained: list[Ints] = []
        logprobs: list[Floats] = []
        versions: list[Ints] = []
        offset = 0
        for index in path_to(self._shard, leaf):
            span = self._shard.spans[index]
            ids.append(span.ids)
            if span.kind == "completion" and index not in self._seen:
                self._seen.add(index)
                made_by = span.token_versions()
                keep = self._trainable(session, index) & (made_by >= 0)
                self.masked += int((~keep).sum())
                trained.append(np.flatnonzero(keep).astype(np.int32) + offset)
                logprobs.append(span.logprobs[keep])
                versions.append(made_by[keep])
            offset += len(span.ids)
        positions = np.concatenate(trained) if trained else np.empty(0, np.int32)
        if not len(positions):
            return None
        if positions[0] == 0:
            raise self._shard.error(f"session {session.id} has a completion without a prompt")
        # What follows the last trained token cannot change its log-prob: computing it would be waste.
        path_ids = np.concatenate(ids)[: positions[-1] + 1]
        return Row(session.id, path_ids, positions, np.concatenate(logprobs), np.concatenate(versions))

    def _trainable(self, session: SessionRow, index: int) -> bool:
        name = self._shard.spans[index].generation
        generation = self._generations.get(name)
        if generation is None or generation.session != session.id:
            raise self._shard.error(
                f"session {session.id} passes through completion span {index} of generation {name!r}, "
                "which is not one of its own"
            )
        return generation.trainable
