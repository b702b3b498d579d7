"""An answer that comes from one owner after the other reaches its client as one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.relay import _Telling

EVENTS = [b'data: {"n":%d}\n\n' % number for number in range(6)]
KEEP_ALIVES = [b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n']
WHOLE = b"".join(EVENTS)
STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"x-seamlessflow-turn", b"3")]}


class Client:
    """What it was sent."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.data = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.starts.append(message["status"])
        else:
            self.data += message.get("body", b"")


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return [*parts, data[at:]]


@given(
    st.lists(st.sampled_from([*EVENTS, *KEEP_ALIVES]), max_size=12),
    st.lists(st.integers(0, 30), max_size=20),
    st.integers(0, 40),
)
async def test_a_stream_that_breaks_anywhere_goes_on_behind_its_last_whole_event(
    events: list[bytes], sizes: list[int], lost: int
) -> None:
    client = Client()
    telling = _Telling(client)
    told = b"".join(events)
    await telling(STREAM)
    for part in cut(told[: max(len(told) - lost, 0)], sizes):
        await telling({"type": "http.response.body", "body": part, "more_body": True})
    has = b"".join(event for event in client.data.split(b"\n\n") if not event.startswith((b":", b"event: ping")))
    count = len(has) + 2 * client.data.count(b'data: {"n"')
    assert told.startswith(client.data)
    assert telling.position == b"3 %d" % count
    await telling(STREAM)
    await telling({"type": "http.response.body", "body": EVENTS[0]})
    assert client.starts == [200]
    assert client.data.endswith(EVENTS[0])


async def test_a_body_of_which_only_white_space_was_sent_may_come_from_another_owner() -> None:
    client = Client()
    telling = _Telling(client)
    head = {"type": "http.response.start", "status": 200, "headers": []}
    await telling(head)
    await telling({"type": "http.response.body", "body": b" ", "more_body": True})
    await telling(head)
    await telling({"type": "http.response.body", "body": b"{}"})
    assert (client.starts, client.data) == ([200], b" {}")
    with pytest.raises(ConnectionError):
        await telling(head)


async def test_an_error_behind_the_beginning_of_an_answer_breaks_the_connection() -> None:
    telling = _Telling(Client())
    await telling(STREAM)
    with pytest.raises(ConnectionError):
        await telling({**STREAM, "status": 500})
