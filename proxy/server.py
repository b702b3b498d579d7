"""uvicorn as the proxy uses it: it ends when told to, and answers in as few writes as there can be."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.asgi import GONE, IDLE_S, App, Scope


def settings(app: App, *, log_level: str, shutdown_s: int) -> uvicorn.Config:
    """How ``app`` is served; open requests may go on for ``shutdown_s`` after SIGTERM."""
    return uvicorn.Config(
        app,
        http=Protocol,
        log_level=log_level,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=shutdown_s,
    )


class Server(uvicorn.Server):
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


class Protocol(HttpToolsProtocol):
    """uvicorn's, over a :class:`Joined` transport; every scope has a future that is done when its client is gone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.loop))
        self._gone = self.loop.create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self._gone.done():
            self._gone.set_result(None)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Scope, self.scope)[GONE] = self._gone

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a long body stops it, and a client that goes would not be noticed


class Joined(asyncio.Transport):
    """Sends what is written in one turn of the loop together: a head with its body, which uvicorn writes one by one."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.set_protocol = transport.set_protocol  # type: ignore[method-assign]

    def write(self, data: Any) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
