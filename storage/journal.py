"""The journal: an append-only record of every token, committed before an agent sees it (I3).

One thread writes; commits are grouped (see :mod:`storage.group_commit`). The
file is SQLite, used directly and not through SQLAlchemy, because the writer's
CPU per token is the proxy's budget.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import sqlalchemy as sa

from storage.databases import BUSY_TIMEOUT_S, Durability
from storage.errors import ConfigError, StorageError
from storage.group_commit import GroupCommit

CLOSED = "closed"
"""Kind of the record that ends a session."""

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, closed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL,
    ids BLOB, logprobs BLOB, n_ids INTEGER NOT NULL, n_sampled INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_session ON records (session);
"""
_INSERT = "INSERT INTO records (session, kind, data, ids, logprobs, n_ids, n_sampled) VALUES (?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, eq=False)
class JournalRecord:
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


class _Row(NamedTuple):
    session: str
    kind: str
    data: bytes
    ids: bytes | None
    logprobs: bytes | None
    n_ids: int
    n_sampled: int


class _Work(NamedTuple):
    """What one call wants in one transaction: rows to write or sessions to forget."""

    rows: Sequence[_Row] = ()
    deletes: Sequence[str] = ()


class Journal:
    """The journal of one proxy, the only process that opens it.

    Args:
        url: ``sqlite:///<path>``.
        durability: what an acknowledged record survives: ``"process"`` any crash of ours, ``"power"`` also a power cut.
    """

    def __init__(self, url: str, durability: Durability = "process") -> None:
        path = _path(url)
        self._connection = _connect(path, durability)
        self._reader = _connect(path, durability)
        self._reading = threading.Lock()
        self._connection.executescript(_TABLES)
        found = self._connection.execute("SELECT TOTAL(n_ids), TOTAL(n_sampled) FROM records").fetchone()
        self._counts = TokenCounts(int(found[0]), int(found[1]))
        self._numbers: dict[str, int] = {}
        """Row ids of sessions; belongs to the writer's thread."""
        self._writer = GroupCommit[_Work](f"journal {path}", self._commit)

    async def append(self, *records: JournalRecord) -> None:
        """Returns when the records are committed: all in one transaction, in order, after all earlier appends.

        Raises:
            StorageError: they are not in the journal (disk full, ...), none of them.
        """
        rows = [_encode(record) for record in records]
        await self._writer.submit(
            _Work(rows=rows), sum(len(row.data) + 4 * (row.n_ids + row.n_sampled) for row in rows)
        )

    async def delete(self, *sessions: str) -> None:
        """Forget sessions and all their records."""
        await self._writer.submit(_Work(deletes=sessions), 0)

    def read(self, session: str) -> list[JournalRecord]:
        """Committed records of a session in order; empty for an unknown session. Blocks: call it in a thread."""
        query = (
            "SELECT kind, data, ids, logprobs FROM records"
            " WHERE session = (SELECT id FROM sessions WHERE session = ?) ORDER BY seq"
        )
        return [
            JournalRecord(session, kind, orjson.loads(data), _array(ids, np.int32), _array(logprobs, np.float32))
            for kind, data, ids, logprobs in self._select(query, session)
        ]

    def open_sessions(self) -> list[str]:
        """Sessions without a ``closed`` record, in the order they began."""
        return [row[0] for row in self._select("SELECT session FROM sessions WHERE closed = 0 ORDER BY id")]

    def tokens(self) -> TokenCounts:
        """Tokens in the journal. Does not block."""
        return self._counts

    def tokens_by_session(self) -> dict[str, TokenCounts]:
        """Tokens of each session. Reads everything: for audits."""
        query = (
            "SELECT sessions.session, TOTAL(n_ids), TOTAL(n_sampled) FROM sessions"
            " LEFT JOIN records ON records.session = sessions.id GROUP BY sessions.id"
        )
        return {session: TokenCounts(int(ids), int(sampled)) for session, ids, sampled in self._select(query)}

    def close(self) -> None:
        """Commit what was appended and close the file. Blocks."""
        self._writer.close()
        self._connection.close()
        with self._reading:
            self._reader.close()

    def _select(self, query: str, *arguments: str) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, arguments).fetchall()

    def _commit(self, works: Sequence[_Work]) -> None:
        """Runs in the writer's thread only."""
        connection = self._connection
        ids, sampled = self._counts.ids, self._counts.sampled
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Deletions are rare: between them all rows go in one statement, in the order of their appends.
            for deletes, group in groupby(works, key=lambda work: bool(work.deletes)):
                work = list(group)
                if deletes:
                    changes = [self._delete(session) for one in work for session in one.deletes]
                else:
                    changes = self._insert([row for one in work for row in one.rows])
                ids += sum(change[0] for change in changes)
                sampled += sum(change[1] for change in changes)
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            self._numbers.clear()
            raise
        self._counts = TokenCounts(ids, sampled)

    def _insert(self, rows: Sequence[_Row]) -> list[tuple[int, int]]:
        numbers = [self._numbers.get(row.session) or self._number(row.session) for row in rows]
        self._connection.executemany(_INSERT, [(n, *row[1:]) for n, row in zip(numbers, rows, strict=True)])
        for number, row in zip(numbers, rows, strict=True):
            if row.kind == CLOSED:
                self._connection.execute("UPDATE sessions SET closed = 1 WHERE id = ?", (number,))
        return [(row.n_ids, row.n_sampled) for row in rows]

    def _number(self, session: str) -> int:
        self._connection.execute("INSERT OR IGNORE INTO sessions (session) VALUES (?)", (session,))
        found = self._connection.execute("SELECT id FROM sessions WHERE session = ?", (session,)).fetchone()
        self._numbers[session] = int(found[0])
        return int(found[0])

    def _delete(self, session: str) -> tuple[int, int]:
        self._numbers.pop(session, None)
        query = (
            "SELECT sessions.id, TOTAL(n_ids), TOTAL(n_sampled) FROM sessions"
            " JOIN records ON records.session = sessions.id WHERE sessions.session = ? GROUP BY sessions.id"
        )
        found = self._connection.execute(query, (session,)).fetchone()
        if found is None:
            return 0, 0
        self._connection.execute("DELETE FROM records WHERE session = ?", (found[0],))
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (found[0],))
        return -int(found[1]), -int(found[2])


def _path(url: str) -> Path:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        raise ConfigError(f"journal {parsed.render_as_string()}: must be sqlite:///<file>")
    path = Path(parsed.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _connect(path: Path, durability: Durability) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    except sqlite3.Error as error:
        raise StorageError(f"journal {path} cannot be opened: {error}") from error
    return connection


def _encode(record: JournalRecord) -> _Row:
    ids, logprobs = record.ids, record.logprobs
    if ids is not None and ids.dtype != np.int32:
        raise StorageError(f"journal record {record.kind!r} of {record.session}: ids are {ids.dtype}, must be int32")
    if logprobs is not None and (ids is None or logprobs.dtype != np.float32 or logprobs.shape != ids.shape):
        raise StorageError(
            f"journal record {record.kind!r} of {record.session}: log-probs are {logprobs.dtype}{logprobs.shape}, "
            f"must be float32, one for each id"
        )
    return _Row(
        record.session,
        record.kind,
        orjson.dumps(record.data),
        None if ids is None else ids.tobytes(),
        None if logprobs is None else logprobs.tobytes(),
        0 if ids is None else len(ids),
        0 if logprobs is None else len(logprobs),
    )


def _array(data: bytes | None, dtype: Any) -> npt.NDArray[Any] | None:
    return None if data is None else np.frombuffer(data, dtype=dtype)
