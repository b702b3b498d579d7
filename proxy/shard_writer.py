"""Complete groups become shards: one prefix-merged object per group, then one ledger transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from proxy.sessions import Sessions
from proxy.trajectory.session import Session
from proxy.trajectory.tree import ROOT, Tree, merge_into, run_lengths
from proxy.trajectory.turn import Choice, Turn
from storage import shards
from storage.errors import NotFoundError, SeamlessFlowError, StorageError
from storage.ledger import TRAIN, GroupRows, Ledger, SampleRow

TOO_SMALL = "group_too_small"
"""Cause of a group with fewer than two scored samples: it has no advantage."""
MAX_GROUPS = 64
"""Complete groups without a shard beyond which nothing new starts, so that a store that is away costs no memory."""
MAX_TOKENS = 32_000_000
"""The same by the tokens of their sessions."""
SLOW_S = 5.0
"""A write that takes longer is told as a wait."""
_PAUSE_S = 2.0
"""Before a shard that could not be written is tried again."""

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What is needed of the object store."""

    def put(self, key: str, data: bytes) -> str: ...


class ShardWriter:
    """Writes in threads, one group after another per run; :meth:`kick` never waits."""

    def __init__(self, ledger: Ledger, store: Store, sessions: Sessions) -> None:
        self._ledger = ledger
        self._store = store
        self._sessions = sessions
        self._wanted: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sweeping = asyncio.Lock()
        self._since: dict[str, float] = {}
        """Since when the oldest unwritten group of a run is tried."""
        self._problems: dict[str, str] = {}

    async def full(self, run: str) -> bool:
        """Whether so much of ``run`` waits for the object store that nothing new may start."""
        groups, tokens = await asyncio.to_thread(self._ledger.unwritten, run)
        return groups >= MAX_GROUPS or tokens >= MAX_TOKENS

    def waits_for(self, run: str) -> str:
        """What its shards wait for, since when and why; empty if they are written as they come."""
        since, problem = self._since.get(run), self._problems.get(run, "")
        if since is None or not (problem or time.time() - since > SLOW_S):
            return ""
        at = datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
        return f"the object store since {at}" + (f": {problem}" if problem else "")

    def kick(self, run: str) -> None:
        """Look for complete groups of ``run`` now; also called for every run at start."""
        self._wanted.add(run)
        if run not in self._tasks:
            self._tasks[run] = asyncio.create_task(self._work(run), name=f"shards of {run}")

    async def idle(self) -> None:
        """Wait until nothing is left to write."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Stop; a group that was being written is found again at the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sweep(self, run: str) -> int:
        """Write every complete group; returns how many."""
        async with self._sweeping:
            try:
                groups = await asyncio.to_thread(self._ledger.complete_groups, run, TRAIN)
            except NotFoundError:
                return 0  # nothing was ever admitted to train
            for group in groups:
                await self._write(group)
            return len(groups)

    async def _work(self, run: str) -> None:
        try:
            while run in self._wanted:
                self._wanted.discard(run)
                try:
                    await self.sweep(run)
                except SeamlessFlowError as error:
                    self._problems[run] = str(error)
                    _log.error("shards of run %s: %s; trying again in %g s", run, error, _PAUSE_S)
                    self._wanted.add(run)
                    await asyncio.sleep(_PAUSE_S)
        finally:
            del self._tasks[run]

    async def _write(self, group: GroupRows) -> None:
        where = (group.run, group.stream, group.ordinal)
        self._since.setdefault(group.run, time.time())
        names = [row.session or "" for row in group.scored]
        if len(names) < 2:
            await asyncio.to_thread(self._ledger.filter_group, *where, TOO_SMALL)
        else:
            sessions = [(await self._sessions.get(name)).session for name in names]
            await asyncio.to_thread(self._write_shard, group, sessions)
        self._since.pop(group.run)
        self._problems.pop(group.run, None)
        for name in names:
            self._sessions.forget(name)

    def _write_shard(self, group: GroupRows, sessions: Sequence[Session]) -> None:
        shard = build_shard(group, sessions)
        data = shards.encode(shard)
        digest = shards.digest_of(data)
        key = shards.key_for(group.run, group.ordinal, digest)
        if self._store.put(key, data) != digest:
            raise StorageError(f"{key}: the object store reports another digest than was sent")
        tokens = {session.id: trainable_tokens(session) for session in sessions}
        self._ledger.commit_group(group.run, group.stream, group.ordinal, key, digest, tokens)


def build_shard(group: GroupRows, sessions: Sequence[Session]) -> shards.Shard:
    """The group's sessions in one tree; ``sessions`` are aligned with ``group.scored``."""
    tree = Tree()
    moved = []
    for session in sessions:
        moved.append(merge_into(tree, session.tree, session.tree.sampled()))
    order = {index: position for position, index in enumerate(tree.preorder())}
    order[ROOT] = shards.ROOT
    generations: list[shards.Generation] = []
    rows: list[shards.SessionRow] = []
    for row, session, places in zip(group.scored, sessions, moved, strict=True):
        trainable = session.trainable()
        for turn, choice in session.generations():
            if choice.recording.ids:
                spans = tuple(order[index] for index in tree.generation_spans(places[choice.end]))
                generations.append(_generation(session.id, turn, choice, spans, choice.generation in trainable))
        rows.append(_session_row(row, session, places, order))
    return shards.Shard(group.run, group.stream, group.ordinal, _spans(tree, order), tuple(generations), tuple(rows))


def trainable_tokens(session: Session) -> int:
    """Sampled tokens of a session that may enter a loss: their generation may, and their version is known."""
    trainable = session.trainable()
    return sum(
        count
        for _, choice in session.generations()
        if choice.generation in trainable
        for version, count in choice.recording.version_runs()
        if version >= 0
    )


def _spans(tree: Tree, order: dict[int, int]) -> tuple[shards.Span, ...]:
    spans: list[shards.Span | None] = [None] * len(tree.spans)
    for index, span in enumerate(tree.spans):
        parent = order[span.parent]
        versions = run_lengths(span.versions)
        spans[order[index]] = shards.Span(parent, span.kind, span.ids, span.logprobs, versions, span.generation)
    return tuple(span for span in spans if span is not None)


def _generation(session: str, turn: Turn, choice: Choice, spans: tuple[int, ...], trainable: bool) -> shards.Generation:
    return shards.Generation(
        id=choice.generation,
        session=session,
        turn=turn.index,
        choice=choice.index,
        spans=spans,
        finish_reason=choice.finish_reason or choice.status,
        temperature=turn.used.temperature,
        top_p=turn.used.top_p,
        trainable=trainable,
        segments=tuple(segment.to_json() for segment in choice.recording.segments),
    )


def _session_row(row: SampleRow, session: Session, places: dict[int, int], order: dict[int, int]) -> shards.SessionRow:
    parents = {session.tree.spans[index].parent for index in places}
    return shards.SessionRow(
        id=session.id,
        sample=row.key.sample,
        attempt=row.attempt,
        reward=float(row.reward if row.reward is not None else "nan"),
        status="finished",
        turns=len(session.turns),
        forks=session.forks(),
        leaves=tuple(order[group_index] for index, group_index in places.items() if index not in parents),
    )
