"""Ledgers of earlier releases, brought up to the schema of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from storage.books.schema import VERSION, about, metadata, runs, sessions


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
        column = CreateColumn(sessions.c[name]).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE sessions ADD COLUMN {column}")
    # Nobody noted when they began or ended: the start of their run is a bound for both.
    began = sa.select(runs.c.created).where(runs.c.run == sessions.c.run).scalar_subquery()
    connection.execute(sessions.update().values(created=sa.func.coalesce(began, 0.0)))
    connection.execute(sessions.update().where(sessions.c.closed).values(ended=sessions.c.created))


_STEPS: Mapping[str, Callable[[sa.Connection], None]] = {"2": _from_2}


def prepare(connection: sa.Connection) -> str:
    """Make what is missing of the schema, in the caller's transaction; returns the version the database has then.

    It is not :data:`storage.books.schema.VERSION` where there is no way from the version it had.
    """
    about.create(connection, checkfirst=True)
    found = connection.scalar(sa.select(about.c.value).where(about.c.name == "schema"))
    if found is None:
        connection.execute(about.insert().values(name="schema", value=str(VERSION)))
    elif found in _STEPS:
        _STEPS[found](connection)
        connection.execute(about.update().where(about.c.name == "schema").values(value=str(VERSION)))
    elif found != str(VERSION):
        return str(found)
    metadata.create_all(connection)
    for index in sessions.indexes:
        index.create(connection, checkfirst=True)
    return str(VERSION)
