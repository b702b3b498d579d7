"""The journal on a PostgreSQL server, for the proxies of several hosts.

psycopg is used directly and not through SQLAlchemy, because the writer's CPU
per token is the proxy's budget. A commit is one statement: it locks the rows of
its sessions against a change of owner, leaves out what is fenced, writes the
rest and notes its own number. So it can be repeated when the connection broke
and nobody knows whether it came through.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import chain, groupby, repeat
from typing import Any, LiteralString, TypeVar

import psycopg
import sqlalchemy as sa

from storage.databases import BUSY_TIMEOUT_S, CONNECT_LIMIT_S, Durability
from storage.errors import SeamlessFlowError, StorageError
from storage.group_commit import Refusals
from storage.journals.base import (
    CLOSED,
    Append,
    Delete,
    Journal,
    JournalRecord,
    Removed,
    Take,
    TokenCounts,
    Work,
    fenced,
    records,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PAUSES_S = (0.01, 0.1, 0.3)
_ANYBODY = -1
"""Epoch of rows that whoever may write."""
_LOCK = 0x5EA10
_COLUMNS = ("session", "epoch", "kind", "n_ids", "n_sampled", "data", "ids", "logprobs")

# The token counts of a session are those of its removed records; those of a writer are all that it ever appended.
# Ids and log-probs do not compress.
_SCHEMA: LiteralString = """
CREATE TABLE IF NOT EXISTS journal_sessions (
    id BIGSERIAL PRIMARY KEY, session TEXT NOT NULL UNIQUE, closed BOOLEAN NOT NULL DEFAULT FALSE,
    owner TEXT, epoch BIGINT NOT NULL DEFAULT 0, n_ids BIGINT NOT NULL DEFAULT 0, n_sampled BIGINT NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS journal_records (
    seq BIGSERIAL PRIMARY KEY, session BIGINT NOT NULL, kind TEXT NOT NULL,
    n_ids INTEGER NOT NULL, n_sampled INTEGER NOT NULL, data BYTEA NOT NULL, ids BYTEA, logprobs BYTEA
);
CREATE INDEX IF NOT EXISTS journal_records_by_session ON journal_records (session, seq);
CREATE TABLE IF NOT EXISTS journal_writers (
    writer TEXT PRIMARY KEY, commits BIGINT NOT NULL, n_ids BIGINT NOT NULL, n_sampled BIGINT NOT NULL
);
ALTER TABLE journal_records ALTER COLUMN ids SET STORAGE EXTERNAL, ALTER COLUMN logprobs SET STORAGE EXTERNAL;
"""
_COMMIT: LiteralString = """
WITH me AS (
    SELECT writer FROM journal_writers WHERE writer = %(writer)s AND commits < %(number)s FOR UPDATE
), owned AS (
    SELECT id, epoch FROM journal_sessions, me WHERE id = ANY(%(sessions)b::bigint[])
    ORDER BY id FOR SHARE OF journal_sessions
), wanted AS (
    SELECT * FROM unnest(
        %(session)b::bigint[], %(epoch)b::bigint[], %(kind)b::text[], %(n_ids)b::integer[], %(n_sampled)b::integer[],
        %(data)b::bytea[], %(ids)b::bytea[], %(logprobs)b::bytea[]
    ) WITH ORDINALITY AS given (session, epoch, kind, n_ids, n_sampled, data, ids, logprobs, place)
), written AS (
    INSERT INTO journal_records (session, kind, n_ids, n_sampled, data, ids, logprobs)
    SELECT wanted.session, kind, n_ids, n_sampled, data, ids, logprobs
    FROM wanted JOIN owned ON owned.id = wanted.session AND wanted.epoch IN (owned.epoch, -1)
    ORDER BY place RETURNING session, kind, n_ids, n_sampled
), counted AS (
    UPDATE journal_writers SET commits = %(number)s,
        n_ids = n_ids + (SELECT COALESCE(SUM(n_ids), 0) FROM written),
        n_sampled = n_sampled + (SELECT COALESCE(SUM(n_sampled), 0) FROM written)
    WHERE writer = (SELECT writer FROM me)
), ended AS (
    UPDATE journal_sessions SET closed = TRUE WHERE id IN (SELECT session FROM written WHERE kind = %(closed)s)
)
SELECT id, epoch FROM owned
"""
_NEW_SESSIONS: LiteralString = (
    "INSERT INTO journal_sessions (session) SELECT unnest(%s::text[]) ON CONFLICT (session) DO NOTHING"
)
_TAKE: LiteralString = (
    "INSERT INTO journal_sessions (session, owner, epoch) VALUES (%s, %s, 1) ON CONFLICT (session)"
    " DO UPDATE SET owner = EXCLUDED.owner, epoch = journal_sessions.epoch + 1 RETURNING epoch"
)
_DELETE: LiteralString = """
WITH gone AS (
    DELETE FROM journal_records WHERE session = %s RETURNING n_ids, n_sampled,
        octet_length(data) + COALESCE(octet_length(ids), 0) + COALESCE(octet_length(logprobs), 0) AS bytes
)
SELECT count(*), COALESCE(SUM(bytes), 0), COALESCE(SUM(n_ids), 0), COALESCE(SUM(n_sampled), 0) FROM gone
"""


class PostgresJournal(Journal):
    """The journal in the database at ``url``, whose tables it makes if they are not there.

    At durability ``process`` the server does not wait for its disk: should the server itself crash, up to half a
    second of commits is lost, unless a ledger on the same server was written since.
    """

    def __init__(self, url: sa.URL, durability: Durability) -> None:
        self._url = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._options = " ".join(
            f"-c {name}={value}"
            for name, value in {
                "synchronous_commit": "on" if durability == "power" else "off",
                "lock_timeout": f"{BUSY_TIMEOUT_S * 1000:.0f}",
                "idle_in_transaction_session_timeout": f"{BUSY_TIMEOUT_S * 1000:.0f}",
            }.items()
        )
        name = f"journal {url.render_as_string()}"
        self._writing = _Line(name, self._connect)
        self._reading = _Line(name, self._connect)
        self._lock = threading.Lock()  # over the line for reading
        self._numbers: dict[str, int] = {}
        """Row ids of sessions; belongs to the writer's thread."""
        self._writer_id = uuid.uuid4().hex
        self._commits = 0
        self._writing.run(self._prepare)
        super().__init__(name, self._commit, None)

    def read(self, session: str) -> list[JournalRecord]:
        query: LiteralString = (
            "SELECT kind, data, ids, logprobs FROM journal_records"
            " WHERE session = (SELECT id FROM journal_sessions WHERE session = %s) ORDER BY seq"
        )
        return [record for row in self._select(query, session) for record in records(session, *row)]

    def open_sessions(self) -> list[str]:
        return [row[0] for row in self._select("SELECT session FROM journal_sessions WHERE NOT closed ORDER BY id")]

    def owner(self, session: str) -> tuple[str, int] | None:
        found = self._select(
            "SELECT owner, epoch FROM journal_sessions WHERE session = %s AND owner IS NOT NULL", session
        )
        return found[0] if found else None

    def tokens(self) -> TokenCounts:
        ((ids, sampled),) = self._select("SELECT SUM(n_ids), SUM(n_sampled) FROM journal_writers")
        return TokenCounts(int(ids), int(sampled))

    def tokens_by_session(self) -> dict[str, TokenCounts]:
        query: LiteralString = (
            "SELECT s.session, s.n_ids + COALESCE(SUM(r.n_ids), 0), s.n_sampled + COALESCE(SUM(r.n_sampled), 0)"
            " FROM journal_sessions s LEFT JOIN journal_records r ON r.session = s.id GROUP BY s.id"
        )
        return {session: TokenCounts(int(ids), int(sampled)) for session, ids, sampled in self._select(query)}

    def close(self) -> None:
        self._writer.close()
        self._writing.close()
        with self._lock:
            self._reading.close()

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self._url,
            autocommit=True,
            options=self._options,
            connect_timeout=CONNECT_LIMIT_S,
            tcp_user_timeout=int(BUSY_TIMEOUT_S * 1000),
        )

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            connection.execute(_SCHEMA)
            me = "INSERT INTO journal_writers VALUES (%s, 0, 0, 0) ON CONFLICT (writer) DO NOTHING"
            connection.execute(me, (self._writer_id,))

    def _select(self, query: LiteralString, *arguments: str) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._reading.run(lambda connection: connection.execute(query, arguments).fetchall())

    def _commit(self, works: Sequence[Work]) -> Refusals:
        """Statements in the order of the calls: all appends between two rarer calls go in one.

        What precedes a statement that fails is written: failures are told by item.
        """
        refusals: dict[int, SeamlessFlowError] = {}
        places = iter(range(len(works)))
        for kind, group in groupby(works, key=type):
            batch = list(group)
            mine = [next(places) for _ in batch]
            try:
                if kind is Append:
                    late = self._append([work for work in batch if isinstance(work, Append)])
                    refusals |= {mine[index]: error for index, error in late.items()}
                else:
                    for work in batch:
                        self._change(work)
            except (psycopg.Error, StorageError) as error:
                refusals |= {index: StorageError(f"not committed: {error}") for index in mine}
        return refusals

    def _append(self, works: Sequence[Append]) -> dict[int, SeamlessFlowError]:
        self._commits += 1
        number = self._commits
        named = {row.session for work in works for row in work.rows}
        unknown = [session for session in named if session not in self._numbers]

        def write(connection: psycopg.Connection[Any]) -> dict[int, int]:
            if not unknown:
                return self._write(connection, works, number)
            with connection.transaction():
                self._find(connection, works, unknown)
                return self._write(connection, works, number)

        try:
            owned = self._writing.run(write)
        except BaseException:
            for session in unknown:
                self._numbers.pop(session, None)
            raise
        refusals: dict[int, SeamlessFlowError] = {}
        for index, work in enumerate(works):
            session = work.rows[0].session if work.rows else ""
            if work.rows and work.epoch is not None and owned.get(self._numbers.get(session, 0)) != work.epoch:
                refusals[index] = fenced(session, work.epoch)
        for row in (row for work in works for row in work.rows if row.kind == CLOSED):
            self._numbers.pop(row.session, None)
        return refusals

    def _find(self, connection: psycopg.Connection[Any], works: Sequence[Append], unknown: Sequence[str]) -> None:
        """Row ids of sessions that this process did not write to yet. What has an epoch was made by taking it."""
        new = {row.session for work in works if work.epoch is None for row in work.rows}.intersection(unknown)
        if new:
            connection.execute(_NEW_SESSIONS, (sorted(new),))
        query: LiteralString = "SELECT session, id FROM journal_sessions WHERE session = ANY(%s::text[])"
        self._numbers.update(connection.execute(query, (list(unknown),)).fetchall())

    def _write(self, connection: psycopg.Connection[Any], works: Sequence[Append], number: int) -> dict[int, int]:
        """One commit; returns the epochs of its sessions by row id."""
        rows = [
            (self._numbers.get(row.session, 0), _ANYBODY if work.epoch is None else work.epoch, *row[1:])
            for work in works
            for row in work.rows
        ]
        values = {name: [row[place] for row in rows] for place, name in enumerate(_COLUMNS)}
        sessions = sorted({row[0] for row in rows})
        about: dict[str, Any] = {"sessions": sessions, "number": number, "writer": self._writer_id, "closed": CLOSED}
        found = connection.execute(_COMMIT, values | about).fetchall()
        if not found:  # no such session, or an attempt whose answer was lost did come through
            query: LiteralString = "SELECT id, epoch FROM journal_sessions WHERE id = ANY(%s::bigint[])"
            found = connection.execute(query, (sessions,)).fetchall()
        return dict(found)

    def _change(self, work: Work) -> None:
        if isinstance(work, Take):
            arguments = (work.session, work.owner)
            ((work.epoch,),) = self._writing.run(lambda connection: connection.execute(_TAKE, arguments).fetchall())
        elif isinstance(work, Delete):
            work.removed = self._writing.run(lambda connection: _delete(connection, work.session))


class _Line:
    """One connection, made anew when it broke; what collided or was cut off is tried again for a while."""

    def __init__(self, name: str, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._name = name
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None

    def run(self, operation: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Raises StorageError after ``BUSY_TIMEOUT_S``; what ``operation`` does wrong itself is raised at once."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        for pause_s in chain(_PAUSES_S, repeat(1.0)):
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = self._connect()
                return operation(self._connection)
            except psycopg.OperationalError as error:
                if time.monotonic() + pause_s > deadline:
                    raise StorageError(f"{self._name}: {error}") from error
                _log.warning("%s: %s; trying again", self._name, error)
            time.sleep(pause_s)
        raise AssertionError  # the pauses never end

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _delete(connection: psycopg.Connection[Any], session: str) -> Removed:
    with connection.transaction():
        query: LiteralString = "SELECT id, n_ids, n_sampled FROM journal_sessions WHERE session = %s FOR UPDATE"
        found = connection.execute(query, (session,)).fetchone()
        if found is None:
            return Removed()
        number, ids, sampled = found
        ((rows, size, more_ids, more_sampled),) = connection.execute(_DELETE, (number,)).fetchall()
        counts = TokenCounts(int(ids + more_ids), int(sampled + more_sampled))
        change: LiteralString = (
            "UPDATE journal_sessions SET n_ids = %s, n_sampled = %s, owner = NULL, epoch = epoch + 1 WHERE id = %s"
        )
        connection.execute(change, (counts.ids, counts.sampled, number))
    return Removed(int(rows), int(size), {session: counts})
