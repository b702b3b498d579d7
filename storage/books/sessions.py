"""What the proxies must know of a session whatever happens to them: key, policy, owner, end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part, insert_new
from storage.books.records import SampleKey, SessionRecord
from storage.books.schema import sessions
from storage.errors import FencedError, NotFoundError, RewardError

_KEY_HASH = sa.select(sessions.c.key_hash).where(sessions.c.session == sa.bindparam("session"))
_FIELDS = tuple(field.name for field in fields(SessionRecord) if field.name != "key")


class Sessions(Part):
    """Sessions, each bound to an attempt or, for a remote agent, to itself."""

    def put_session(self, *records: SessionRecord) -> None:
        """Enter sessions in one transaction; the same session again changes nothing.

        Raises:
            FencedError: a session exists with another key.
        """
        with self._db.write() as connection:
            # In one order everywhere: two callers with the same sessions must not wait for each other.
            for record in sorted(records, key=lambda record: record.session):
                insert_new(connection, sessions, ("session",), _session_row(record))
                if connection.scalar(_KEY_HASH, {"session": record.session}) != record.key_hash:
                    raise FencedError(f"session {record.session!r} exists with another key")

    def session(self, session: str) -> SessionRecord:
        """Raises NotFoundError if there is no such session."""
        found = self._sessions(sessions.c.session == session)
        if not found:
            raise _no_session(session)
        return found[0]

    def session_by_key_hash(self, key_hash: str) -> SessionRecord | None:
        """The session a key belongs to, closed ones included."""
        found = self._sessions(sessions.c.key_hash == key_hash)
        return found[0] if found else None

    def sessions_of(
        self, run: str | None, *, open_only: bool = False, after: str = "", limit: int | None = None
    ) -> Sequence[SessionRecord]:
        """Sessions of a run (None: of all) by id, at most ``limit`` of those behind ``after``."""
        condition = (sessions.c.session > after) & (sa.true() if run is None else sessions.c.run == run)
        return self._sessions(condition & sessions.c.closed.is_(False) if open_only else condition, limit)

    def open_sessions(self, run: str) -> int:
        """How many sessions of a run are not closed."""
        query = sa.select(sa.func.count()).where(sessions.c.run == run, sessions.c.closed.is_(False))
        with self._db.read() as connection:
            return int(connection.scalar(query) or 0)

    def children_of(self, session: str) -> Sequence[SessionRecord]:
        """Sessions that were opened on behalf of another."""
        return self._sessions(sessions.c.parent == session)

    def close_session(self, session: str) -> None:
        """The session's key is refused from now on; closing twice is allowed."""
        with self._db.write() as connection:
            close_sessions(connection, sessions.c.session == session)

    def own_session(self, session: str, proxy: str, expected_owner: str | None) -> None:
        """Make ``proxy`` the owner in place of ``expected_owner``; again changes nothing.

        It is who comes first that counts: of two that expect the same owner one gets the session.

        Raises:
            FencedError: it has another owner than expected.
            NotFoundError: there is no such session.
        """
        with self._db.write() as connection:
            here = sessions.c.session == session
            # Two equal NULLs are meant to match.
            expected = sessions.c.proxy.is_not_distinct_from(expected_owner)
            if connection.execute(sessions.update().where(here, expected).values(proxy=proxy)).rowcount:
                return
            row = connection.execute(sa.select(sessions.c.proxy).where(here)).one_or_none()
            if row is None:
                raise _no_session(session)
            if row.proxy != proxy:
                raise FencedError(f"session {session!r} is owned by {row.proxy!r}, not by {expected_owner!r}")

    def reward_session(self, session: str, reward: float | None, cause: str | None = None) -> None:
        """Note the reward of a session outside the sample queue, or why it has none; the same again changes nothing.

        Raises:
            RewardError: the reward is not finite, or missing without a cause.
            FencedError: it has another one already, or is of a sample, which has its own.
            NotFoundError: there is no such session.
        """
        if cause is None if reward is None else not math.isfinite(reward):
            raise RewardError(f"reward of session {session!r} is {reward}: must be finite, or missing with a cause")
        with self._db.write() as connection:
            here = sessions.c.session == session
            unset = sessions.c.reward.is_(None) & sessions.c.reward_cause.is_(None) & sessions.c.stream.is_(None)
            change = sessions.update().where(here, unset).values(reward=reward, reward_cause=cause)
            if connection.execute(change).rowcount:
                return
            row = connection.execute(sa.select(sessions).where(here)).one_or_none()
            if row is None:
                raise _no_session(session)
            if row.stream is not None:
                raise FencedError(f"session {session!r} is of sample {row.ordinal}.{row.sample}: score the sample")
            if (row.reward, row.reward_cause) != (reward, cause):
                raise FencedError(f"session {session!r} has reward {row.reward} ({row.reward_cause}) already")

    def count_turns(self, session: str, turns: int, forks: int) -> None:
        """Note how many turns a session has had so far, and how many of them were forks."""
        with self._db.write() as connection:
            change = sessions.update().where(sessions.c.session == session)
            connection.execute(change.values(turns=turns, forks=forks))

    def turns_of(self, run: str) -> tuple[int, int]:
        """(turns, forks) of a run as far as they were noted."""
        query = sa.select(sa.func.sum(sessions.c.turns), sa.func.sum(sessions.c.forks)).where(sessions.c.run == run)
        with self._db.read() as connection:
            turns, forks = connection.execute(query).one()
        return int(turns or 0), int(forks or 0)

    def _sessions(self, condition: sa.ColumnElement[bool], limit: int | None = None) -> list[SessionRecord]:
        query = sa.select(sessions).where(condition).order_by(sessions.c.session).limit(limit)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return [_session_record(row) for row in rows]


def close_sessions(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> None:
    """Close those that are open, at this time."""
    change = sessions.update().where(condition, sessions.c.closed.is_(False))
    connection.execute(change.values(closed=True, ended=time.time()))


def _no_session(session: str) -> NotFoundError:
    return NotFoundError(f"no session {session!r} in the ledger")


def _session_row(record: SessionRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in _FIELDS} | {"policy": dict(record.policy)}
    return row | ({} if record.key is None else asdict(record.key))


def _session_record(row: sa.Row[Any]) -> SessionRecord:
    key = None if row.stream is None else SampleKey(row.run, row.stream, row.ordinal, row.sample)
    return SessionRecord(key=key, **{name: getattr(row, name) for name in _FIELDS})
