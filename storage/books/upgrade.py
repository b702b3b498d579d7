"""Ledgers of earlier releases, brought up to the schema of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from storage.books.schema import VERSION, about, checkpoints, groups, metadata, runs, sessions, streams


def _from_2(connection: sa.Connection) -> None:
    """Sessions know their parent, times, owner and reward, and what is left of them in the journal."""
    for name in (
        "parent",
        "label",
        "created",
        "ended",
        "proxy",
        "reward",
        "reward_cause",
        "turns",
        "forks",
        "collected",
    ):
        _add(connection, sessions.c[name])
    # Nobody noted when they began or ended: the start of their run is a bound for both.
    began = sa.select(runs.c.created).where(runs.c.run == sessions.c.run).scalar_subquery()
    connection.execute(sessions.update().values(created=sa.func.coalesce(began, 0.0)))
    connection.execute(sessions.update().where(sessions.c.closed).values(ended=sessions.c.created))


def _from_3(connection: sa.Connection) -> None:
    """Groups know when they were complete, streams what an open route lets run."""
    _add(connection, groups.c.completed)
    _add(connection, streams.c.per_route)


def _from_4(connection: sa.Connection) -> None:
    """Streams know which tasks wait for the newest weights."""
    _add(connection, streams.c.fresh_from)
    _add(connection, streams.c.fresh_version)


def _from_5(connection: sa.Connection) -> None:
    """A checkpoint may be of two gangs."""
    _add(connection, checkpoints.c.critic_path)
    _add(connection, checkpoints.c.critic_digest)


def _add(connection: sa.Connection, column: sa.Column[Any]) -> None:
    definition = CreateColumn(column).compile(dialect=connection.dialect)
    connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {definition}")


_STEPS: Mapping[str, Callable[[sa.Connection], None]] = {"2": _from_2, "3": _from_3, "4": _from_4, "5": _from_5}
"""From a version to the next."""


def prepare(connection: sa.Connection) -> str:
    """Make what is missing of the schema, in the caller's transaction; returns the version the database has then.

    It is not :data:`storage.books.schema.VERSION` where there is no way from the version it had.
    """
    about.create(connection, checkfirst=True)
    found = connection.scalar(sa.select(about.c.value).where(about.c.name == "schema"))
    if found is None:
        connection.execute(about.insert().values(name="schema", value=str(VERSION)))
    elif found in _STEPS:
        for version in range(int(found), VERSION):
            _STEPS[str(version)](connection)
        connection.execute(about.update().where(about.c.name == "schema").values(value=str(VERSION)))
    elif found != str(VERSION):
        return str(found)
    metadata.create_all(connection)
    for index in sessions.indexes:
        index.create(connection, checkfirst=True)
    return str(VERSION)
