"""``python -m proxy --port N --state DIR [--host ADDRESS]``: serve one proxy until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
import uvloop

from proxy.app import AgentApp
from proxy.asgi import App
from proxy.control import control_app
from proxy.service import Service
from storage.errors import ConfigError, SeamlessFlowError
from storage.journal import open_journal
from storage.ledger import Ledger, Route
from storage.objects import ObjectStore
from workers.cluster import StateFolder
from workers.engines.base import Engine
from workers.engines.sglang import SglangEngine

SHUTDOWN_S = 5
"""How long open requests may go on after SIGTERM; their generations continue when the clients retry."""


def make_engine(route: Route) -> Engine:
    """The adapter for a route; SGLang, the embedded and the scripted engine speak one wire."""
    return SglangEngine(route.url)


class _Server(uvicorn.Server):
    """Stops on SIGTERM and SIGINT and returns; uvicorn's own raises the signal again and skips our clean-up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


@asynccontextmanager
async def serving(state: StateFolder) -> AsyncIterator[App]:
    """The whole application of one proxy process over ``state``."""
    cluster, secrets = state.cluster(), state.secrets()
    ledger = Ledger(cluster.ledger_url, durability=cluster.durability)
    journal = open_journal(cluster.journal_url, cluster.durability)
    service = Service(ledger, journal, ObjectStore.from_state(state), make_engine, base_url=cluster.proxy)
    await service.start()
    try:
        yield AgentApp(service.sessions, control_app(service, secrets.control_key))
    finally:
        await service.close()
        await asyncio.to_thread(journal.close)
        await asyncio.to_thread(ledger.close)


async def serve(state: StateFolder, host: str, port: int) -> None:
    """Run until SIGTERM or SIGINT."""
    if not state.secrets().control_key and not _is_loopback(host):
        raise ConfigError(f"--host {host}: without a control key the proxy binds to loopback only")
    async with serving(state) as app:
        config = uvicorn.Config(
            app,
            host,
            port,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        await _Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proxy", description="Serve the trajectory proxy.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True, help="state folder with cluster.json and secrets.json")
    parser.add_argument("--host", default="127.0.0.1")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(StateFolder(arguments.state), arguments.host, arguments.port))
    except SeamlessFlowError as error:
        sys.exit(f"error: {error}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
