"""One SQL database, opened by several processes: transactions, dialect switches, error mapping."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from storage.books import schema
from storage.errors import ConfigError, DeadlineError, StorageError

Durability = Literal["process", "power"]
"""What a commit survives: the death of every process, or also a power cut (an fsync per commit)."""

BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for another process's write."""

_WRITE = "seamlessflow_write"


class Database:
    """Thread-safe access to one database.

    SQLite runs in WAL mode. A writing transaction starts with BEGIN IMMEDIATE,
    so that what it read is still true when it writes; threads of this process
    queue on a lock first, since SQLite's own waiting is by polling. On a server
    data base the same exclusion comes from locking the run's row.
    """

    def __init__(self, url: str, *, durability: Durability = "process") -> None:
        self._url = sa.make_url(url)
        self._sqlite = self._url.get_backend_name() == "sqlite"
        self._writing = threading.Lock()
        self._engine = self._create_engine(durability)
        self._writer = self._engine.execution_options(**{_WRITE: True})
        self._create_tables()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one consistent state and must not write."""
        with self._mapped(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that commits at the end and rolls back on any exception.

        Raises:
            DeadlineError: another writer held the database for ``BUSY_TIMEOUT_S``.
        """
        if not self._sqlite:
            with self._mapped(), self._writer.begin() as connection:
                yield connection
            return
        if not self._writing.acquire(timeout=BUSY_TIMEOUT_S):
            raise DeadlineError(f"waited {BUSY_TIMEOUT_S:.0f} s for the writer of {self._url.render_as_string()}")
        try:
            with self._mapped(), self._writer.begin() as connection:
                yield connection
        finally:
            self._writing.release()

    def close(self) -> None:
        """Close every connection; the database must not be used afterwards."""
        self._engine.dispose()

    def _create_engine(self, durability: Durability) -> sa.Engine:
        if not self._sqlite:
            raise ConfigError(f"ledger {self._url.render_as_string()}: only sqlite:/// URLs are supported yet")
        if not self._url.database or self._url.database == ":memory:":
            raise ConfigError("the ledger needs a file: give a URL like sqlite:////var/lib/seamlessflow/ledger.db")
        Path(self._url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(self._url, pool_size=8, max_overflow=24, connect_args={"timeout": BUSY_TIMEOUT_S})
        synchronous = {"process": "NORMAL", "power": "FULL"}[durability]
        sa.event.listen(engine, "connect", lambda connection, _: _configure_sqlite(connection, synchronous))
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _create_tables(self) -> None:
        with self.write() as connection:
            schema.metadata.create_all(connection)
            found = connection.scalar(sa.select(schema.about.c.value).where(schema.about.c.name == "schema"))
            if found is None:
                connection.execute(schema.about.insert().values(name="schema", value=str(schema.VERSION)))
            elif found != str(schema.VERSION):
                raise ConfigError(
                    f"ledger {self._url.render_as_string()} has schema {found}, this release reads {schema.VERSION}: "
                    "use the release that wrote it, or start with a new state folder"
                )

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.OperationalError as error:
            if "locked" in str(error.orig):
                raise DeadlineError(
                    f"waited {BUSY_TIMEOUT_S:.0f} s for another process's write to {self._url.render_as_string()}"
                ) from error
            raise StorageError(f"ledger {self._url.render_as_string()}: {error.orig}") from error
        except sa.exc.SQLAlchemyError as error:
            raise StorageError(f"ledger {self._url.render_as_string()}: {error}") from error


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


def upsert(connection: sa.Connection, table: sa.Table, keys: Sequence[str], values: Mapping[str, Any]) -> None:
    """Insert ``values``, or update the row that has the same ``keys``."""
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table).values(**values)
    changes = {name: statement.excluded[name] for name in values if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=list(keys), set_=changes))


class Part:
    """Base of the ledger's parts: they share one database."""

    def __init__(self, database: Database) -> None:
        self._db = database
