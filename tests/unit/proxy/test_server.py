"""What uvicorn writes piece by piece leaves in one."""

from __future__ import annotations

import asyncio

from proxy.server import Joined


class Wire(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


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
