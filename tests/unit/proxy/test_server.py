"""What uvicorn writes piece by piece leaves in one, and a client that goes is noticed."""

from __future__ import annotations

import asyncio

import pytest
from uvicorn.server import ServerState

from proxy.asgi import GONE, Receive, Scope, Send
from proxy.server import Joined, Protocol, settings


class Wire(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def test_a_head_and_its_body_are_one_write() -> None:
    wire = Wire()
    joined = Joined(wire, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"body")
    await asyncio.sleep(0)
    joined.write(b"next")
    await asyncio.sleep(0)
    assert wire.written == [b"headbody", b"next"]


async def test_what_was_written_leaves_before_the_connection_is_closed() -> None:
    wire = Wire()
    joined = Joined(wire, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"body")
    joined.close()
    assert (wire.written, wire.closed) == ([b"headbody"], True)
    await asyncio.sleep(0)
    assert wire.written == [b"headbody"]


async def test_nothing_is_written_to_a_connection_that_broke() -> None:
    wire = Wire()
    joined = Joined(wire, asyncio.get_running_loop())
    joined.write(b"head")
    wire.closed = True
    await asyncio.sleep(0)
    assert wire.written == []


@pytest.mark.parametrize("length", [3, 1_000_000])
async def test_a_client_that_goes_before_its_answer_is_noticed_however_long_its_body_was(length: int) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await scope[GONE]

    wire, config = Wire(), settings(app, log_level="warning", shutdown_s=1)
    protocol = Protocol(config, ServerState(), {})
    protocol.connection_made(wire)
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % length + b"x" * length)
    await asyncio.sleep(0)
    assert wire.reading
    assert not scopes[0][GONE].done()
    protocol.connection_lost(None)
    assert scopes[0][GONE].done()
