"""What the proxy must know again after a restart: routes and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part, upsert
from storage.books.records import Route, SampleKey, SessionRecord
from storage.books.schema import node_epochs, routes, sessions
from storage.errors import ConfigError, FencedError, NotFoundError

_KEY_HASH = sa.select(sessions.c.key_hash).where(sessions.c.session == sa.bindparam("session"))
_INSERT = sessions.insert()

ROUTE_STATES = ("open", "held", "closed")


class Sessions(Part):
    """Routes to engines, fenced by the epoch of their node, and sessions, bound to an attempt."""

    def put_route(self, route: Route) -> None:
        """Set the route of a lease; it replaces routes of older epochs on its node.

        Raises:
            FencedError: the node was leased with a newer epoch since.
        """
        if route.state not in ROUTE_STATES:
            raise ConfigError(
                f"route of lease {route.lease!r} has state {route.state!r}: must be one of {ROUTE_STATES}"
            )
        with self._db.write() as connection:
            _advance_epoch(connection, route.node, route.epoch)
            older = (routes.c.node == route.node) & (routes.c.epoch < route.epoch)
            connection.execute(routes.delete().where(older))
            upsert(connection, routes, ("lease",), asdict(route))

    def routes(self) -> list[Route]:
        """All routes by lease."""
        with self._db.read() as connection:
            return [Route(**row._mapping) for row in connection.execute(sa.select(routes).order_by(routes.c.lease))]

    def delete_route(self, lease: str, epoch: int) -> None:
        """Remove the route of a lease; one that is not there is removed already.

        Raises:
            FencedError: the route belongs to a newer epoch.
        """
        with self._db.write() as connection:
            found = connection.scalar(sa.select(routes.c.epoch).where(routes.c.lease == lease))
            if found is not None and found > epoch:
                raise FencedError(f"route of lease {lease!r} is at epoch {found}: epoch {epoch} may not delete it")
            connection.execute(routes.delete().where(routes.c.lease == lease))

    def put_session(self, *records: SessionRecord) -> None:
        """Enter sessions in one transaction; the same session again changes nothing.

        Raises:
            FencedError: a session exists with another key.
        """
        with self._db.write() as connection:
            for record in records:
                found = connection.scalar(_KEY_HASH, {"session": record.session})
                if found is None:
                    connection.execute(_INSERT, _session_row(record))
                elif found != record.key_hash:
                    raise FencedError(f"session {record.session!r} exists with another key")

    def session(self, session: str) -> SessionRecord:
        """Raises NotFoundError if there is no such session."""
        found = self._sessions(sessions.c.session == session)
        if not found:
            raise NotFoundError(f"no session {session!r} in the ledger")
        return found[0]

    def session_by_key_hash(self, key_hash: str) -> SessionRecord | None:
        """The session a key belongs to, closed ones included."""
        found = self._sessions(sessions.c.key_hash == key_hash)
        return found[0] if found else None

    def sessions_of(self, run: str, *, open_only: bool = False) -> Sequence[SessionRecord]:
        """Sessions of a run."""
        condition = sessions.c.run == run
        return self._sessions(condition & sessions.c.closed.is_(False) if open_only else condition)

    def close_session(self, session: str) -> None:
        """The session's key is refused from now on; closing twice is allowed."""
        with self._db.write() as connection:
            connection.execute(sessions.update().where(sessions.c.session == session).values(closed=True))

    def _sessions(self, condition: sa.ColumnElement[bool]) -> list[SessionRecord]:
        with self._db.read() as connection:
            rows = connection.execute(sa.select(sessions).where(condition).order_by(sessions.c.session)).all()
        return [_session_record(row) for row in rows]


def _advance_epoch(connection: sa.Connection, node: str, epoch: int) -> None:
    known = connection.scalar(sa.select(node_epochs.c.epoch).where(node_epochs.c.node == node).with_for_update())
    if known is not None and epoch < known:
        raise FencedError(f"node {node!r} is at epoch {known}: a route of epoch {epoch} is refused")
    if known != epoch:
        upsert(connection, node_epochs, ("node",), {"node": node, "epoch": epoch})


def _session_row(record: SessionRecord) -> dict[str, Any]:
    key = record.key
    place = {"stream": key.stream, "ordinal": key.ordinal, "sample": key.sample} if key else {}
    row = {"session": record.session, "key_hash": record.key_hash, "run": record.run, "attempt": record.attempt}
    return {**row, **place, "policy": dict(record.policy), "closed": record.closed}


def _session_record(row: sa.Row[Any]) -> SessionRecord:
    key = None if row.stream is None else SampleKey(row.run, row.stream, row.ordinal, row.sample)
    return SessionRecord(row.session, row.key_hash, row.run, key, row.attempt, row.policy, row.closed)
