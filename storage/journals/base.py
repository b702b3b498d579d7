"""What the journal is, whatever database it lies in: records, appends, owners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from storage.errors import FencedError, StorageError
from storage.group_commit import DEADLINE_S, Commit, GroupCommit

CLOSED = "closed"
"""Kind of the record that ends a session."""
_SEVERAL = "several"
"""Kind of a row that holds the records of one append, since a row costs more than what is in it. Its data is
``[[kind, data, number of ids or null, whether they have log-probs], ...]``, its ids and log-probs are theirs joined."""


class JournalRecord(NamedTuple):
    """One fact about a session, e.g. a chunk of sampled tokens.

    ``ids`` is int32[n]; ``logprobs`` is float32[n] for sampled tokens, None for others (a prompt). ``data`` is JSON.
    """

    session: str
    kind: str
    data: dict[str, Any]
    ids: npt.NDArray[np.int32] | None = None
    logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class TokenCounts:
    """``ids`` counts every token in the journal, ``sampled`` those with a log-prob."""

    ids: int = 0
    sampled: int = 0


@dataclass(frozen=True)
class Removed:
    """What :meth:`Journal.delete` took away. ``tokens`` are those of each session that was ever appended."""

    rows: int = 0
    bytes: int = 0
    tokens: Mapping[str, TokenCounts] = field(default_factory=dict)


class Row(NamedTuple):
    """Records of one session as the databases hold them."""

    session: str
    kind: str
    n_ids: int
    n_sampled: int
    data: bytes
    ids: bytes | None
    logprobs: bytes | None


@dataclass(slots=True)
class Append:
    """Rows to write, if the session is still at ``epoch`` (None: whoever owns it)."""

    rows: Sequence[Row]
    epoch: int | None = None


@dataclass(slots=True)
class Take:
    """A new owner; ``epoch`` is filled in by the commit."""

    session: str
    owner: str
    epoch: int = 0


@dataclass(slots=True)
class Delete:
    """A session whose records go; ``removed`` is filled in by the commit."""

    session: str
    removed: Removed = field(default_factory=Removed)


@dataclass(slots=True)
class Tidy:
    """Housekeeping that must not run beside a commit."""


Work = Append | Take | Delete | Tidy
"""What one call wants in one transaction."""


class Journal(ABC):
    """An append-only record of every token, committed before an agent sees it (I3).

    Sessions can have owners. A proxy that takes a session gets an epoch for it and gives that with every append;
    once another proxy has taken the session, such an append is refused, so what the new owner reads is complete.
    """

    def __init__(self, name: str, commit: Commit[Work], quick: Commit[Work] | None) -> None:
        self.name = name
        self._writer = GroupCommit[Work](name, commit, quick)

    async def append(self, *records: JournalRecord, epoch: int | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Returns when the records are committed: all in one transaction, in order, after all earlier appends.

        With ``epoch`` they are of one session that :meth:`take` gave this epoch for.

        Raises:
            FencedError: the session was taken by another owner since; none of them is in the journal.
            StorageError: they are not in the journal (disk full, ...), none of them.
            DeadlineError: ``deadline_s`` went by; they may get there yet.
        """
        rows = _rows(records)
        size = 0
        for row in rows:
            size += len(row.data) + 4 * (row.n_ids + row.n_sampled)
        if epoch is not None and any(row.session != rows[0].session for row in rows):
            raise StorageError(f"{self.name}: an epoch is of one session, these records are of several")
        await self._writer.submit(Append(rows, epoch), size, deadline_s=deadline_s)

    async def take(self, session: str, owner: str) -> int:
        """Make ``owner`` the session's owner, known to the journal or not; returns its epoch, higher than all before.

        No append with an older epoch is committed after this returned.
        """
        work = Take(session, owner)
        await self._writer.submit(work, 0)
        return work.epoch

    async def delete(self, *sessions: str) -> Removed:
        """Remove all records of sessions and who owns them; their token counts stay.

        An owner that had not noticed the end of its session cannot write to it any more.
        """
        works = [Delete(session) for session in sessions]
        for work in works:
            # Each alone: other appends need not wait for all of them.
            await self._writer.submit(work, 0, slow=True)
        tokens: dict[str, TokenCounts] = {}
        for work in works:
            tokens.update(work.removed.tokens)
        return Removed(sum(work.removed.rows for work in works), sum(work.removed.bytes for work in works), tokens)

    @abstractmethod
    def read(self, session: str) -> list[JournalRecord]:
        """Committed records of a session in order; empty for an unknown session. Blocks: call it in a thread."""

    @abstractmethod
    def open_sessions(self) -> list[str]:
        """Sessions without a ``closed`` record, in the order they began. Blocks."""

    @abstractmethod
    def owner(self, session: str) -> tuple[str, int] | None:
        """Who took the session last, with the epoch; None: nobody. Blocks."""

    @abstractmethod
    def tokens(self) -> TokenCounts:
        """Tokens that were ever appended. Blocks while it asks a server."""

    @abstractmethod
    def tokens_by_session(self) -> dict[str, TokenCounts]:
        """Tokens that were ever appended to each session. Reads everything: for audits."""

    @abstractmethod
    def close(self) -> None:
        """Commit what was appended and close. Blocks."""


def fenced(session: str, epoch: int | None) -> FencedError:
    """The error of an append that came too late."""
    return FencedError(f"session {session} was taken by another proxy: epoch {epoch} may not write to it any more")


def records(session: str, kind: str, data: bytes, ids: bytes | None, logprobs: bytes | None) -> list[JournalRecord]:
    """A row's records as they were appended."""
    all_ids, all_logprobs = _array(ids, np.int32), _array(logprobs, np.float32)
    if kind != _SEVERAL:
        return [JournalRecord(session, kind, orjson.loads(data), all_ids, all_logprobs)]
    found, at, sampled_at = [], 0, 0
    for one, about, count, sampled in orjson.loads(data):
        mine = None if count is None or all_ids is None else all_ids[at : at + count]
        theirs = all_logprobs[sampled_at : sampled_at + count] if sampled and all_logprobs is not None else None
        at, sampled_at = at + (count or 0), sampled_at + (count if sampled else 0)
        found.append(JournalRecord(session, one, about, mine, theirs))
    return found


def _rows(records: Sequence[JournalRecord]) -> list[Row]:
    """One row for neighbours of one session; what ends a session has its own."""
    rows: list[Row] = []
    start = 0
    for end, record in enumerate(records, 1):
        after = records[end] if end < len(records) else None
        if after is None or after.session != record.session or CLOSED in (record.kind, after.kind):
            rows.append(_row(records[start:end]))
            start = end
    return rows


def _row(records: Sequence[JournalRecord]) -> Row:
    ids, logprobs, about = [], [], []
    for record in records:
        _check(record)
        if record.ids is not None:
            ids.append(record.ids)
        if record.logprobs is not None:
            logprobs.append(record.logprobs)
        count = None if record.ids is None else len(record.ids)
        about.append((record.kind, record.data, count, record.logprobs is not None))
    kind, data = (records[0].kind, records[0].data) if len(records) == 1 else (_SEVERAL, about)
    counts = sum(map(len, ids)), sum(map(len, logprobs))
    return Row(records[0].session, kind, *counts, orjson.dumps(data), _joined(ids), _joined(logprobs))


def _check(record: JournalRecord) -> None:
    """Raises StorageError."""
    ids, logprobs = record.ids, record.logprobs
    if ids is not None and ids.dtype != np.int32:
        raise StorageError(f"journal record {record.kind!r} of {record.session}: ids are {ids.dtype}, must be int32")
    if logprobs is not None and (ids is None or logprobs.dtype != np.float32 or logprobs.shape != ids.shape):
        raise StorageError(
            f"journal record {record.kind!r} of {record.session}: log-probs are {logprobs.dtype}{logprobs.shape}, "
            f"must be float32, one for each id"
        )


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> bytes | None:
    return b"".join([array.tobytes() for array in arrays]) if arrays else None


def _array(data: bytes | None, dtype: Any) -> npt.NDArray[Any] | None:
    return None if data is None else np.frombuffer(data, dtype=dtype)
