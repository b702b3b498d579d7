"""``python -m proxy --port N --state DIR [--host ADDRESS] [--url URL]``: serve one proxy until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvloop

from proxy.asgi import App
from proxy.relay import application
from proxy.server import Server, settings
from proxy.service import Service
from storage.databases import database_url
from storage.errors import ConfigError, SeamlessFlowError
from storage.journal import open_journal
from storage.ledger import Ledger, Route
from storage.objects import ObjectStore
from workers.cluster import ClusterConfig, StateFolder
from workers.engines.base import Engine
from workers.engines.kinds import connect

BACKLOG = 2048
PREDECESSOR_S = 3.0
"""How long a proxy that was killed may take to let go of its files."""
SHUTDOWN_S = 5
"""How long open requests may go on after SIGTERM; their generations continue when the clients retry."""


def make_engine(route: Route) -> Engine:
    """The adapter for the kind of engine that a route leads to."""
    return connect(route.engine_kind, route.url)


@contextmanager
def shared(cluster: ClusterConfig) -> Iterator[bool]:
    """Whether several proxies may use the databases; a SQLite file is kept for this one. Raises ConfigError."""
    databases = database_url("ledger", cluster.ledger_url), database_url("journal", cluster.journal_url)
    kinds = {database.drivername for database in databases}
    if len(kinds) == 2:
        raise ConfigError("ledger and journal must both be SQLite files, or both lie on a PostgreSQL server")
    if kinds != {"sqlite"}:
        yield True
        return
    path = databases[1].database
    with Path(f"{path}.lock").open("a") as file:
        deadline = time.monotonic() + PREDECESSOR_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another proxy writes {path}: a SQLite journal is one proxy's, which alone knows what its "
                        "sessions hold. Several proxies share a PostgreSQL database: `seamlessflow up --proxies N "
                        "--database postgresql://...`"
                    ) from None
                time.sleep(0.1)
        yield False


@asynccontextmanager
async def serving(state: StateFolder, url: str) -> AsyncIterator[App]:
    """The whole application of one proxy process over ``state``, which is reached at ``url``."""
    cluster, key = state.cluster(), state.secrets().control_key
    with shared(cluster) as several:
        ledger = Ledger(cluster.ledger_url, durability=cluster.durability)
        journal = open_journal(cluster.journal_url, cluster.durability)
        store = ObjectStore.from_state(state)
        service = Service(ledger, journal, store, make_engine, base_url=url, peer_key=key if several else None)
        await service.start()
        _settle()
        try:
            yield application(service, key)
        finally:
            await service.close()
            await asyncio.to_thread(journal.close)
            await asyncio.to_thread(ledger.close)


async def serve(state: StateFolder, host: str, port: int, url: str | None) -> None:
    """Run until SIGTERM or SIGINT."""
    if not state.secrets().control_key and not _is_loopback(host):
        raise ConfigError(f"--host {host}: without a control key the proxy binds to loopback only")
    # Whoever has the address has the sessions of the process that had it before.
    with _listener(host, port) as listener:
        async with serving(state, url or state.cluster().proxy) as app:
            await Server(settings(app, log_level="warning", shutdown_s=SHUTDOWN_S)).serve([listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error}") from error


def _settle() -> None:
    """What has been loaded stays: collections look at what came later only, and seldom: requests leave no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 100)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proxy", description="Serve the trajectory proxy.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True, help="state folder with cluster.json and secrets.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--url", help="where agents and other proxies reach this process; default: as in cluster.json")
    arguments = parser.parse_args()
    # One text at a time is encoded here: the tokenizer's own threads cost more than they do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(StateFolder(arguments.state), arguments.host, arguments.port, arguments.url))
    except SeamlessFlowError as error:
        sys.exit(f"error: {error}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
