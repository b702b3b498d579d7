"""One SQL database, opened by several processes: transactions, dialect switches, error mapping."""

from __future__ import annotations

import functools
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from storage.books import schema, upgrade
from storage.databases import BUSY_TIMEOUT_S, CONNECT_LIMIT_S, Durability, database_url
from storage.errors import ConfigError, DeadlineError, StorageError

CLOSE_LIMIT_S = 5.0
"""For transactions of threads whose tasks were cancelled."""
IDLE_LIMIT_S = 120
"""A server ends a transaction whose process stopped in the middle of it: it would hold its run's lock."""

_WRITE = "seamlessflow_write"
_LOCKS = 0x5EA
"""Class of our advisory locks."""
_COLLISIONS = ("40001", "40P01")
"""What PostgreSQL says of transactions that have to be repeated: not serialisable, deadlock."""
_PAUSES_S = (0.01, 0.05, 0.2, 0.5, 1.0)


class Collision(StorageError):
    """The server gave up a transaction in favour of another one: nothing was written, it can be repeated."""


class Database:
    """Thread-safe access to one database.

    SQLite runs in WAL mode. A writing transaction starts with BEGIN IMMEDIATE,
    so that what it read is still true when it writes; threads of this process
    queue on a lock first, since SQLite's own waiting is by polling. On
    PostgreSQL the same exclusion comes from locking the run's row, or from
    :func:`exclusively` for what belongs to no run; each statement after that
    lock sees all that was committed before.
    """

    def __init__(self, url: str, *, durability: Durability = "process") -> None:
        self._url = database_url("ledger", url)
        self._name = f"ledger {self._url.render_as_string()}"
        self._sqlite = self._url.drivername == "sqlite"
        self._writing = threading.Lock()
        engine = _sqlite_engine(self._url, durability) if self._sqlite else _postgres_engine(self._url)
        self._engine = engine
        self._writer = engine.execution_options(**{_WRITE: True})
        snapshot = {} if self._sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = engine.execution_options(**snapshot)
        self._prepare()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one consistent state and must not write."""
        with self._mapped(), self._reader.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that commits at the end and rolls back on any exception.

        Raises:
            DeadlineError: another writer held the database, or the row that is to be written, for ``BUSY_TIMEOUT_S``.
            Collision: see there; parts of the ledger repeat it.
        """
        if not self._sqlite:
            with self._mapped(), self._writer.begin() as connection:
                yield connection
            return
        if not self._writing.acquire(timeout=BUSY_TIMEOUT_S):
            raise DeadlineError(f"waited {BUSY_TIMEOUT_S:.0f} s for the writer of {self._name}")
        try:
            with self._mapped(), self._writer.begin() as connection:
                yield connection
        finally:
            self._writing.release()

    def close(self) -> None:
        """Close every connection, those in use when their transaction has ended; nothing may begin afterwards."""
        deadline = time.monotonic() + CLOSE_LIMIT_S
        pool = self._engine.pool
        while isinstance(pool, sa.QueuePool) and pool.checkedout() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._engine.dispose()

    def _prepare(self) -> None:
        with self.write() as connection:
            exclusively(connection, "schema")
            version = upgrade.prepare(connection)
            if version != str(schema.VERSION):
                raise ConfigError(
                    f"{self._name} has schema {version}, this release reads {schema.VERSION}: "
                    "use the release that wrote it, or start with a new state folder"
                )

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state in _COLLISIONS:
                raise Collision(f"{self._name}: {error.orig}") from error
            if state == "55P03" or (self._sqlite and "locked" in str(error.orig)):
                raise DeadlineError(
                    f"waited {BUSY_TIMEOUT_S:.0f} s for another process's write to {self._name}"
                ) from error
            raise StorageError(f"{self._name}: {error.orig}") from error
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(f"{self._name}: {error}") from error


def _sqlite_engine(url: sa.URL, durability: Durability) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=8, max_overflow=24, connect_args={"timeout": BUSY_TIMEOUT_S})
    synchronous = {"process": "NORMAL", "power": "FULL"}[durability]
    sa.event.listen(engine, "connect", lambda connection, _: _configure_sqlite(connection, synchronous))
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, synchronous: str) -> None:
    # The driver must not start transactions on its own: BEGIN is ours (see _begin_sqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute(f"PRAGMA synchronous = {synchronous}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _postgres_engine(url: sa.URL) -> sa.Engine:
    """Commits are always synchronous: without that, a crash of the server would be a crash that loses them."""
    milliseconds = {"lock_timeout": BUSY_TIMEOUT_S, "idle_in_transaction_session_timeout": IDLE_LIMIT_S}
    settings = " ".join(f"-c {name}={limit * 1000:.0f}" for name, limit in milliseconds.items())
    return sa.create_engine(
        url,
        isolation_level="READ COMMITTED",
        pool_size=8,
        max_overflow=24,
        pool_timeout=BUSY_TIMEOUT_S,
        pool_pre_ping=True,
        connect_args={
            "options": f"{settings} -c synchronous_commit=on",
            "connect_timeout": CONNECT_LIMIT_S,
            "tcp_user_timeout": int(BUSY_TIMEOUT_S * 1000),
        },
    )


def exclusively(connection: sa.Connection, what: str) -> None:
    """Exclude other writers of ``what``, which belongs to no run, for this transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(:locks, hashtext(:what))"), {"locks": _LOCKS, "what": what}
        )


def clock(connection: sa.Connection) -> float:
    """Unix time by the one clock of all who share the database."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
    return time.time()


def upsert(connection: sa.Connection, table: sa.Table, keys: Sequence[str], values: Mapping[str, Any]) -> None:
    """Insert ``values``, or update the row that has the same ``keys``."""
    statement = _insert(connection.dialect.name, table)
    changes = {name: statement.excluded[name] for name in values if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=list(keys), set_=changes), values)


def insert_new(connection: sa.Connection, table: sa.Table, keys: Sequence[str], values: Mapping[str, Any]) -> None:
    """Insert ``values`` unless there is a row that has the same ``keys``."""
    connection.execute(
        _insert(connection.dialect.name, table).on_conflict_do_nothing(index_elements=list(keys)), values
    )


def _insert(dialect: str, table: sa.Table) -> Any:
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


class Part:
    """Base of the ledger's parts: they share one database.

    Each public method is one transaction. One that the server gave up because it collided with another is repeated.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _repeated(method))


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transaction(*arguments: Any, **options: Any) -> Any:
        for pause_s in _PAUSES_S:
            try:
                return method(*arguments, **options)
            except Collision:
                time.sleep(pause_s * random.random())  # noqa: S311  # spreads those that collided
        return method(*arguments, **options)

    return transaction
