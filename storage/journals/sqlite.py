"""The journal in a SQLite file, for the proxies of one host.

SQLite is used directly and not through SQLAlchemy, because the writer's CPU per
token is the proxy's budget. At durability ``process`` a commit is a write
without fsync, made in the event loop. What would fsync there, checkpoints and
the first write after one, is made in threads.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.databases import BUSY_TIMEOUT_S, Durability
from storage.errors import FencedError, SeamlessFlowError, StorageError
from storage.group_commit import Refusals, WouldWait
from storage.journals.base import (
    CLOSED,
    Append,
    Delete,
    Journal,
    JournalRecord,
    Removed,
    Take,
    Tidy,
    TokenCounts,
    Work,
    fenced,
    records,
)

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Written to the write-ahead log, as estimated, before its content moves to the file."""
_PAGE = 1024
"""A commit writes whole pages, most of them for one chunk of tokens."""

# The token counts of a session are those of its removed records; ``counted`` has one row, the tokens that were ever
# appended up to a record. Counts come before blobs: to read what lies behind a large one SQLite reads all of it.
_SESSION_COLUMNS = {
    "owner": "TEXT",
    "epoch": "INTEGER NOT NULL DEFAULT 0",
    "n_ids": "INTEGER NOT NULL DEFAULT 0",
    "n_sampled": "INTEGER NOT NULL DEFAULT 0",
}
_TABLES = (
    "CREATE TABLE IF NOT EXISTS sessions ("
    " id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, closed INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS records ("
    " seq INTEGER PRIMARY KEY, session INTEGER NOT NULL, kind TEXT NOT NULL, n_ids INTEGER NOT NULL,"
    " n_sampled INTEGER NOT NULL, data BLOB NOT NULL, ids BLOB, logprobs BLOB)",
    "CREATE INDEX IF NOT EXISTS records_by_session ON records (session)",
    "CREATE TABLE IF NOT EXISTS counted (id INTEGER PRIMARY KEY, seq INTEGER, n_ids INTEGER, n_sampled INTEGER)",
)
_INSERT = (
    "INSERT INTO records (session, kind, n_ids, n_sampled, data, ids, logprobs) SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7"
    " WHERE ?8 IS NULL OR EXISTS (SELECT 1 FROM sessions WHERE id = ?1 AND epoch = ?8)"
)
_COUNT = (
    "UPDATE counted SET n_ids = n_ids + new.ids, n_sampled = n_sampled + new.sampled, seq = new.last FROM"
    " (SELECT CAST(TOTAL(n_ids) AS INTEGER) AS ids, CAST(TOTAL(n_sampled) AS INTEGER) AS sampled,"
    " IFNULL(MAX(seq), (SELECT seq FROM counted)) AS last FROM records WHERE seq > (SELECT seq FROM counted)) AS new"
)
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"
_PATIENT = f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}"
_IMPATIENT = "PRAGMA busy_timeout = 0"

_log = logging.getLogger(__name__)


class _Refused(Exception):
    """Some rows of the transaction were not inserted: their epoch is out of date."""


class SqliteJournal(Journal):
    """The journal in the file ``path``."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._durability = durability
        self._connection = self._connect()
        self._reader = self._connect()
        self._reading = threading.Lock()
        self._numbers: dict[str, int] = {}
        """Row ids of sessions that are appended to; belongs to whoever commits."""
        self._logged = 0
        self._checkpoint: asyncio.Task[None] | None = None
        self._prepare()
        quick = self._commit_quickly if durability == "process" else None
        super().__init__(f"journal {path}", self._commit_patiently, quick)

    def read(self, session: str) -> list[JournalRecord]:
        query = (
            "SELECT kind, data, ids, logprobs FROM records"
            " WHERE session = (SELECT id FROM sessions WHERE session = ?) ORDER BY seq"
        )
        return [record for row in self._select(query, session) for record in records(session, *row)]

    def open_sessions(self) -> list[str]:
        return [row[0] for row in self._select("SELECT session FROM sessions WHERE closed = 0 ORDER BY id")]

    def owner(self, session: str) -> tuple[str, int] | None:
        found = self._select("SELECT owner, epoch FROM sessions WHERE session = ? AND owner IS NOT NULL", session)
        return found[0] if found else None

    def tokens(self) -> TokenCounts:
        ((ids, sampled),) = self._select(
            "SELECT counted.n_ids + TOTAL(records.n_ids), counted.n_sampled + TOTAL(records.n_sampled)"
            " FROM counted LEFT JOIN records ON records.seq > counted.seq"
        )
        return TokenCounts(int(ids), int(sampled))

    def tokens_by_session(self) -> dict[str, TokenCounts]:
        query = (
            "SELECT sessions.session, sessions.n_ids + TOTAL(records.n_ids),"
            " sessions.n_sampled + TOTAL(records.n_sampled)"
            " FROM sessions LEFT JOIN records ON records.session = sessions.id GROUP BY sessions.id"
        )
        return {session: TokenCounts(int(ids), int(sampled)) for session, ids, sampled in self._select(query)}

    def close(self) -> None:
        self._writer.close()
        self._connection.execute(_PATIENT)
        self._connection.execute(_COUNT)
        self._connection.close()
        with self._reading:
            self._reader.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            connection.execute(f"PRAGMA page_size = {_PAGE}")  # of a new file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'power' else 'NORMAL'}")
            # What commits in the event loop must not empty the log on the way.
            pages = CHECKPOINT_BYTES // _PAGE if self._durability == "power" else 0
            connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
        except sqlite3.Error as error:
            raise StorageError(f"journal {self._path} cannot be opened: {error}") from error
        return connection

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        for statement in _TABLES:
            connection.execute(statement)
        present = {row[1] for row in connection.execute("PRAGMA table_info(sessions)")}
        for name, definition in _SESSION_COLUMNS.items():
            if name not in present:
                connection.execute(f"ALTER TABLE sessions ADD COLUMN {name} {definition}")
        connection.execute("INSERT OR IGNORE INTO counted VALUES (1, 0, 0, 0)")
        # Also because the first write of a log is synchronous: it must not be an append.
        connection.execute(_COUNT)
        connection.execute("COMMIT")
        connection.execute(_IMPATIENT)

    def _select(self, query: str, *arguments: str) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, arguments).fetchall()

    def _commit_quickly(self, works: Sequence[Work]) -> Refusals:
        try:
            refusals = self._commit(works)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise WouldWait from error
            raise
        if self._logged >= CHECKPOINT_BYTES:
            self._logged = 0
            self._checkpoint = asyncio.create_task(self._empty_log(), name=f"checkpoint of {self.name}")
        return refusals

    def _commit_patiently(self, works: Sequence[Work]) -> Refusals:
        self._connection.execute(_PATIENT)
        try:
            return self._commit(works)
        finally:
            self._connection.execute(_IMPATIENT)

    def _commit(self, works: Sequence[Work]) -> Refusals:
        if len(works) == 1 and isinstance(works[0], Append) and self._append_chunk(works[0]):
            return {}
        try:
            return self._transaction(works, careful=False)
        except _Refused:
            return self._transaction(works, careful=True)

    def _append_chunk(self, work: Append) -> bool:
        """Insert a row that needs no more than that, which is what most appends are; False: nothing was done."""
        row = work.rows[0] if len(work.rows) == 1 else None
        number = None if row is None or row.kind == CLOSED else self._numbers.get(row.session)
        if row is None or number is None:
            return False
        self._logged += len(row.data) + 4 * (row.n_ids + row.n_sampled) + 2 * _PAGE
        return self._connection.execute(_INSERT, (number, *row[1:], work.epoch)).rowcount == 1

    def _transaction(self, works: Sequence[Work], *, careful: bool) -> Refusals:
        connection = self._connection
        refusals: dict[int, FencedError] = {}
        rows: list[tuple[Any, ...]] = []
        connection.execute("BEGIN IMMEDIATE")
        try:
            for index, work in enumerate(works):
                if isinstance(work, Append):
                    if careful and self._is_fenced(work):
                        refusals[index] = fenced(work.rows[0].session, work.epoch)
                    else:
                        rows += [(self._number(row.session), *row[1:], work.epoch) for row in work.rows]
                    continue
                # These are rare: between them all rows go in one statement, in the order of their appends.
                self._insert(rows)
                rows = []
                if isinstance(work, Take):
                    self._take(work)
                elif isinstance(work, Delete):
                    self._delete(work)
            self._insert(rows)
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            self._numbers.clear()
            raise
        self._logged += _PAGE
        if any(isinstance(work, Tidy) for work in works):
            connection.execute(_CHECKPOINT)
            connection.execute(_COUNT)  # the first write to the empty log, which is synchronous
        return refusals

    def _is_fenced(self, work: Append) -> bool:
        if work.epoch is None or not work.rows:
            return False
        query = "SELECT epoch FROM sessions WHERE session = ?"
        found = self._connection.execute(query, (work.rows[0].session,)).fetchone()
        return found is None or found[0] != work.epoch

    def _insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if not rows:
            return
        if self._connection.executemany(_INSERT, rows).rowcount != len(rows):
            raise _Refused
        for row in rows:
            self._logged += len(row[4]) + 4 * (row[2] + row[3]) + _PAGE
            if row[1] == CLOSED:
                self._connection.execute("UPDATE sessions SET closed = 1 WHERE id = ?", row[:1])

    def _number(self, session: str) -> int:
        number = self._numbers.get(session)
        if number is None:
            self._connection.execute("INSERT OR IGNORE INTO sessions (session) VALUES (?)", (session,))
            found = self._connection.execute("SELECT id FROM sessions WHERE session = ?", (session,)).fetchone()
            number = self._numbers[session] = int(found[0])
        return number

    def _take(self, work: Take) -> None:
        number = self._number(work.session)
        change = "UPDATE sessions SET owner = ?, epoch = epoch + 1 WHERE id = ?"
        self._connection.execute(change, (work.owner, number))
        work.epoch = self._connection.execute("SELECT epoch FROM sessions WHERE id = ?", (number,)).fetchone()[0]

    def _delete(self, work: Delete) -> None:
        connection = self._connection
        found = connection.execute(
            "SELECT sessions.id, sessions.n_ids + TOTAL(records.n_ids), sessions.n_sampled + TOTAL(records.n_sampled),"
            " COUNT(seq), TOTAL(LENGTH(data) + IFNULL(LENGTH(ids), 0) + IFNULL(LENGTH(logprobs), 0))"
            " FROM sessions LEFT JOIN records ON records.session = sessions.id"
            " WHERE sessions.session = ? GROUP BY sessions.id",
            (work.session,),
        ).fetchone()
        if found is None:
            return
        number, ids, sampled, rows, size = map(int, found)
        self._numbers.pop(work.session, None)
        connection.execute(_COUNT)
        connection.execute("DELETE FROM records WHERE session = ?", (number,))
        left = "UPDATE sessions SET n_ids = ?, n_sampled = ?, owner = NULL, epoch = epoch + 1 WHERE id = ?"
        connection.execute(left, (ids, sampled, number))
        connection.execute("UPDATE counted SET seq = (SELECT IFNULL(MAX(seq), 0) FROM records)")
        work.removed = Removed(rows, size, {work.session: TokenCounts(ids, sampled)})
        self._logged += size + _PAGE * rows

    async def _empty_log(self) -> None:
        """Most of it beside the writer, what was written meanwhile between two commits."""
        try:
            await asyncio.to_thread(self._checkpoint_aside)
            await self._writer.submit(Tidy(), 0, slow=True)
        except (sqlite3.Error, SeamlessFlowError) as error:
            _log.warning("%s: its write-ahead log was not emptied, it grows until the next time: %s", self.name, error)

    def _checkpoint_aside(self) -> None:
        connection = self._connect()
        try:
            connection.execute(_CHECKPOINT)
        finally:
            connection.close()
