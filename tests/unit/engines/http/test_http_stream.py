"""The way to an engine: what goes over its connections, when they are used again, and each way they break."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from raw_server import Behaviour, Peer, RawServer, raw_server

from storage.errors import ConfigError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Chunk, Sampling
from workers.engines.sglang import SglangEngine

RID = "a" * 32
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(total: int, finish: dict[str, Any] | None = None) -> bytes:
    """The event of token number ``total``, whose id is its number."""
    entry = [-0.5, total, None]
    meta = {
        "finish_reason": finish,
        "completion_tokens": total,
        "weight_version": "0",
        "output_token_logprobs": [entry],
    }
    return b"data: " + orjson.dumps({"output_ids": [total], "meta_info": meta}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST = chunk(event(3, {"type": "length", "length": 3}))
ANSWER = HEAD + chunk(event(1)) + chunk(event(2)) + LAST + chunk(DONE) + END


@asynccontextmanager
async def engine_at(*behaviours: Behaviour, **options: float) -> AsyncIterator[tuple[RawServer, SglangEngine]]:
    async with raw_server(*behaviours) as server:
        engine = SglangEngine(server.url, **{"deadline_s": 20.0, "stall_s": 20.0, **options})
        try:
            yield server, engine
        finally:
            await engine.close()


def stream(engine: SglangEngine, **options: Any) -> Any:
    return engine.generate(options.pop("ids", [1, 2]), Sampling(max_new_tokens=3, **options), request_id=RID, salt="")


async def collect(
    engine: SglangEngine, into: list[int] | None = None, told: dict[int, asyncio.Event] | None = None
) -> list[int]:
    """The tokens, also in ``into`` as they come; sets the event of each token in ``told``."""
    got = [] if into is None else into
    async for part in stream(engine):
        got += part.ids
        for token in part.ids:
            if told and token in told:
                told[token].set()
    return got


def once(*answers: bytes, then: Callable[[Peer], Any] | None = None) -> Behaviour:
    """Answers one request after the other; ``then`` what happens to the connection (None: it is left open)."""

    async def behave(peer: Peer) -> None:
        for answer in answers:
            await peer.request()
            await peer.send(answer)
        if then is None:
            await peer.gone()
        else:
            then(peer)

    return behave


ALWAYS = once(*[ANSWER] * 9)


async def closing(peer: Peer) -> None:
    """Takes a request and closes without a word."""
    await peer.request()


async def test_requests_one_after_the_other_share_a_connection() -> None:
    async with engine_at(ALWAYS) as (server, engine):
        assert [await collect(engine) for _ in range(3)] == [[1, 2, 3]] * 3
        assert server.connections == 1


async def test_requests_at_once_have_connections_of_their_own_and_later_ones_use_them_again() -> None:
    async with engine_at(ALWAYS) as (server, engine):
        assert await asyncio.gather(*(collect(engine) for _ in range(4))) == [[1, 2, 3]] * 4
        assert server.connections == 4
        await asyncio.gather(*(collect(engine) for _ in range(4)))
        assert server.connections == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(event(1)), event(1)),
        b"HTTP/1.1 200 OK\r\n\r\n" + event(1),
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(event(1)) + END,
        HEAD + b"".join(chunk(bytes([byte])) for byte in event(1)) + END,
    ],
    ids=["content-length", "until-closed", "after-100", "byte-by-byte"],
)
async def test_a_body_in_any_framing_is_read_and_one_without_a_final_event_has_ended_too_soon(answer: bytes) -> None:
    got: list[int] = []
    async with engine_at(once(answer, then=Peer.close)) as (_, engine):
        with pytest.raises(EngineUnavailable, match="ended without a final event, after 1 token"):
            await collect(engine, got)
    assert got == [1]


CUTS = {
    "in the status line": (HEAD[:9], "in the head", 0),
    "in the head": (HEAD[:-2], "in the head", 0),
    "before the first chunk": (HEAD, "in the body", 0),
    "in a chunk size": (HEAD + chunk(event(1)) + b"1", "in the body", 1),
    "in a chunk": (HEAD + chunk(event(1)) + chunk(event(2))[:-9], "in the body", 1),
    "after a chunk": (HEAD + chunk(event(1)) + chunk(event(2)), "in the body", 2),
}


@pytest.mark.parametrize("how", [Peer.close, Peer.reset])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_stream_that_is_cut_is_an_engine_that_went_away_and_what_came_before_stands(
    cut: str, how: Callable[[Peer], None]
) -> None:
    sent, place, tokens = CUTS[cut]
    got: list[int] = []
    read = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(sent)
        if how is Peer.reset and tokens:
            await read.wait()  # a reset may overtake what was sent before it
        how(peer)

    async with engine_at(behave) as (server, engine):
        with pytest.raises(EngineUnavailable, match=f"{place}.*after {tokens} tokens"):
            await collect(engine, got, {tokens: read})
        assert got == list(range(1, tokens + 1))
        assert server.connections == 1


@pytest.mark.parametrize("broken", [b"nonsense\r\n", b"5\r\ntoo long\r\n", b"-1\r\n"])
async def test_a_stream_that_goes_wrong_is_an_engine_that_went_away(broken: bytes) -> None:
    got: list[int] = []
    async with engine_at(once(HEAD + chunk(event(1)) + broken)) as (_, engine):
        with pytest.raises(EngineUnavailable, match="no HTTP"):
            await collect(engine, got)
    assert got == [1]


async def test_a_silent_engine_is_left_at_the_deadline() -> None:
    left = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + chunk(event(1)))
        await peer.gone()
        left.set()

    async with engine_at(behave, stall_s=0.2) as (_, engine):
        with pytest.raises(EngineUnavailable, match=r"stalled: nothing for 0\.2 s, after 1 tokens"):
            await collect(engine)
        await asyncio.wait_for(left.wait(), 20)


async def test_an_engine_that_takes_a_request_and_says_nothing_is_left_at_the_deadline() -> None:
    async with engine_at(once(b""), stall_s=0.2) as (server, engine):
        with pytest.raises(EngineUnavailable, match="stalled"):
            await collect(engine)
        assert server.connections == 1


async def test_a_reader_that_takes_its_time_is_no_silence_of_the_engine() -> None:
    asked = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + chunk(event(1)))
        await asked.wait()
        await peer.send(chunk(event(2)) + LAST + END)
        await peer.gone()

    async with engine_at(behave, stall_s=0.3) as (_, engine):
        parts = stream(engine)
        assert (await anext(parts)).ids == (1,)
        await asyncio.sleep(0.8)  # the deadline passes, which nobody tells
        asked.set()
        assert [token for part in [part async for part in parts] for token in part.ids] == [2, 3]


async def test_a_connection_that_nobody_takes_ends_at_the_deadline() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # fills the queue of connections to be accepted
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        engine = SglangEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", deadline_s=0.3)
        with pytest.raises(EngineUnavailable, match=r"no connection within 0\.3 s"):
            await collect(engine)
        await engine.close()


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    async with engine_at(ALWAYS) as (server, _):
        url = server.url
    engine = SglangEngine(url)
    with pytest.raises(EngineUnavailable, match="no connection"):
        await collect(engine)
    await engine.close()


def refusal(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, EngineRejected), (404, EngineProtocolError), (429, EngineRejected), (503, EngineUnavailable)],
)
async def test_a_refusal_carries_the_engines_words_and_its_connection_is_used_again(
    status: int, kind: type[Exception]
) -> None:
    async with engine_at(once(refusal(status, b'{"error":{"message":"too long"}}'), ANSWER)) as (server, engine):
        with pytest.raises(kind, match=f"generate answered {status}: too long"):
            await collect(engine)
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 1


async def test_a_refusal_that_is_cut_is_an_engine_that_went_away() -> None:
    async with engine_at(once(refusal(400, b"because")[:-3], then=Peer.close)) as (_, engine):
        with pytest.raises(EngineUnavailable, match="in the body"):
            await collect(engine)


async def test_a_refusal_without_end_is_cut_short_and_its_connection_given_up() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 400 No\r\n\r\n")
        while True:
            await peer.send(b"no " * 4096)

    async with engine_at(behave, ALWAYS) as (server, engine):
        with pytest.raises(EngineRejected, match="answered 400: no no no"):
            await collect(engine)
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 2


async def test_a_connection_that_the_engine_closed_meanwhile_is_replaced() -> None:
    closed = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER)
        await closed.wait()

    async with engine_at(behave, ALWAYS) as (server, engine):
        assert await collect(engine) == [1, 2, 3]
        closed.set()
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 2


async def test_a_kept_connection_that_closes_on_a_request_without_a_word_is_replaced_once() -> None:
    async with engine_at(once(ANSWER, b"", then=Peer.close), ALWAYS) as (server, engine):
        assert [await collect(engine) for _ in range(2)] == [[1, 2, 3]] * 2
        assert server.connections == 2


async def test_there_is_no_third_try() -> None:
    async with engine_at(once(ANSWER, b"", then=Peer.close), closing) as (server, engine):
        await collect(engine)
        with pytest.raises(EngineUnavailable, match="before it answered"):
            await collect(engine)
        assert server.connections == 2


async def test_a_request_on_a_new_connection_is_never_sent_twice() -> None:
    async with engine_at(closing) as (server, engine):
        with pytest.raises(EngineUnavailable, match="before it answered"):
            await collect(engine)
        assert server.connections == 1


async def test_a_request_is_not_sent_again_once_a_byte_of_its_answer_came() -> None:
    async with engine_at(once(ANSWER, b"H", then=Peer.close), ALWAYS) as (server, engine):
        await collect(engine)
        with pytest.raises(EngineUnavailable, match="in the head"):
            await collect(engine)
        assert server.connections == 1


@pytest.mark.parametrize("extra", [HEAD + END, b"\0", event(4)])
async def test_data_behind_an_answer_costs_its_connection_and_nothing_else(extra: bytes) -> None:
    async with engine_at(once(ANSWER + extra), ALWAYS) as (server, engine):
        assert [await collect(engine) for _ in range(2)] == [[1, 2, 3]] * 2
        assert server.connections == 2


@pytest.mark.parametrize("data", [b"H", b"\r\n", HEAD + END])
async def test_data_that_nobody_asked_for_costs_its_connection(data: bytes) -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER)
        await idle.wait()
        await peer.send(data)
        await peer.gone()
        left.set()

    idle, left = asyncio.Event(), asyncio.Event()
    async with engine_at(behave, ALWAYS) as (server, engine):
        await collect(engine)
        idle.set()
        await asyncio.wait_for(left.wait(), 20)
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 2


async def test_the_end_of_an_answer_is_waited_for_behind_the_back_of_its_reader() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[: -len(END)])
        await read.wait()
        await peer.send(END)
        await ALWAYS(peer)

    read = asyncio.Event()
    async with engine_at(behave, ALWAYS) as (server, engine):
        assert await asyncio.wait_for(collect(engine), 20) == [1, 2, 3]
        read.set()
        async with asyncio.timeout(20):
            while not engine._streams._idle:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.005)
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 1


async def test_an_answer_whose_end_does_not_come_costs_its_connection() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(ANSWER[: -len(END)])
        await peer.gone()
        left.set()

    left = asyncio.Event()
    async with engine_at(behave, ALWAYS) as (server, engine):
        assert [await collect(engine) for _ in range(2)] == [[1, 2, 3]] * 2
        assert server.connections == 2
        await asyncio.wait_for(left.wait(), 20)


async def test_an_answer_to_a_request_that_was_not_read_to_its_end_costs_its_connection() -> None:
    async def behave(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(refusal(413, b"too large"))
        await done.wait()

    done = asyncio.Event()
    async with engine_at(behave, ALWAYS) as (server, engine):
        with pytest.raises(EngineRejected, match="too large"):
            await anext(stream(engine, ids=np.zeros(8_000_000, np.int32)))
        assert await collect(engine) == [1, 2, 3]
        assert server.connections == 2
        done.set()


async def test_a_reader_that_leaves_closes_the_connection() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + chunk(event(1)))
        await peer.gone()
        left.set()

    left = asyncio.Event()
    async with engine_at(behave) as (_, engine):
        parts = stream(engine)
        assert (await anext(parts)).ids == (1,)
        await parts.aclose()
        await asyncio.wait_for(left.wait(), 20)


async def test_a_reader_that_is_cancelled_before_the_answer_closes_the_connection() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        taken.set()
        await peer.gone()
        left.set()

    taken, left = asyncio.Event(), asyncio.Event()
    async with engine_at(behave) as (_, engine):
        reading = asyncio.create_task(collect(engine))
        await asyncio.wait_for(taken.wait(), 20)
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled()
        await asyncio.wait_for(left.wait(), 20)


async def test_closing_the_adapter_ends_its_streams() -> None:
    async with engine_at(once(HEAD + chunk(event(1)))) as (_, engine):
        parts = stream(engine)
        assert (await anext(parts)).ids == (1,)
        reading = asyncio.ensure_future(anext(parts))
        await engine.close()
        with pytest.raises(EngineUnavailable, match="closed here"):
            await reading


async def test_the_first_piece_is_handed_over_at_once_and_later_ones_though_nothing_follows() -> None:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        for number in (1, 2):
            await peer.send(chunk(event(number)))
            await read[number].wait()
        await peer.send(LAST + END)
        await peer.gone()

    read = {1: asyncio.Event(), 2: asyncio.Event()}
    async with engine_at(behave) as (_, engine), asyncio.timeout(20):
        assert await collect(engine, told=read) == [1, 2, 3]


async def test_what_comes_while_the_socket_rests_is_handed_over_together() -> None:
    count = 200

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        for number in range(1, count):
            await peer.send(chunk(event(number)))
            await asyncio.sleep(0)  # its reader has the chance to wake for each
        await peer.send(chunk(event(count, {"type": "length", "length": count})) + END)
        await peer.gone()

    parts: list[Chunk] = []
    async with engine_at(behave) as (_, engine):
        parts = [part async for part in stream(engine)]
    assert [token for part in parts for token in part.ids] == list(range(1, count + 1))
    assert len(parts) < count / 2


async def test_an_abort_of_all_ends_the_rest_of_every_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.http_stream.PACE", ((float("inf"), 600.0, 600.0),))
    asked = asyncio.Event()

    async def decode(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD + chunk(event(1)))
        await asked.wait()
        await peer.send(chunk(event(2)))
        await asyncio.sleep(0)
        await peer.send(LAST + chunk(DONE) + END)
        await peer.gone()

    async def abort(peer: Peer) -> None:
        assert orjson.loads(await peer.request())["abort_all"]
        asked.set()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    read = {1: asyncio.Event()}
    async with engine_at(decode, abort) as (_, engine), asyncio.timeout(20):
        reading = asyncio.create_task(collect(engine, told=read))
        await read[1].wait()
        await asyncio.sleep(0.05)
        assert not reading.done()
        await engine.abort(None)
        assert await reading == [1, 2, 3]


async def test_a_prompt_goes_out_alike_as_a_list_or_an_array() -> None:
    bodies: list[bytes] = []

    async def behave(peer: Peer) -> None:
        for _ in range(3):
            bodies.append(await peer.request())
            await peer.send(ANSWER)

    ids = [0, 5, 2**31 - 1]
    async with engine_at(behave) as (_, engine):
        for prompt in (ids, tuple(ids), np.array(ids, np.int32)):
            async for _ in stream(engine, ids=prompt):
                pass
    assert bodies[0] == bodies[1] == bodies[2]
    assert orjson.loads(bodies[0])["input_ids"] == ids


async def test_ids_outside_the_vocabulary_are_refused_before_anything_is_sent() -> None:
    async with engine_at(ALWAYS) as (server, _):
        engine = SglangEngine(server.url, vocab_size=50)
        for prompt in ([1, 50], [-1, 1], np.array([1, 50], np.int32), np.array([-1], np.int32)):
            with pytest.raises(EngineRejected, match="outside the vocabulary of 50"):
                await anext(stream(engine, ids=prompt))
        with pytest.raises(EngineRejected, match="empty"):
            await anext(stream(engine, ids=np.array([], np.int32)))
        await engine.close()
        assert server.connections == 0


async def test_a_url_may_have_a_path_and_its_host_is_named() -> None:
    heads: list[bytes] = []

    async def behave(peer: Peer) -> None:
        heads.append(await peer.reader.readuntil(b"\r\n\r\n"))

    async with raw_server(behave) as server:
        engine = SglangEngine(server.url + "/engines/7/")
        with pytest.raises(EngineUnavailable):
            await collect(engine)
        await engine.close()
    assert heads[0].startswith(b"POST /engines/7/generate HTTP/1.1\r\nHost: " + server.url[7:].encode() + b"\r\n")


async def test_an_https_url_is_spoken_to_in_tls() -> None:
    first: list[bytes] = []

    async def behave(peer: Peer) -> None:
        first.append(await peer.reader.readexactly(1))

    async with raw_server(behave) as server:
        engine = SglangEngine(server.url.replace("http", "https"))
        with pytest.raises(EngineUnavailable, match="no connection"):
            await collect(engine)
        await engine.close()
    assert first == [b"\x16"]


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://127.0.0.1", "http://", "http://user:word@host"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of an engine"):
        SglangEngine(url)
