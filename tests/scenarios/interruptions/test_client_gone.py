"""The client goes away, in each of the five windows of a request: the engine is freed, the tokens stay, none is
trained, nobody goes on from them, and a retry finds them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from interruptions import Call, busy, sent
from spoken import CHAT, DIALECTS

from proxy.testing import toy_ids
from proxy.trajectory.session import Session
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello")
RETRY = {"x-stainless-retry-count": "1"}
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_dialect = pytest.mark.parametrize("spoken", DIALECTS, ids=str)


async def retried(bench, spoken, body):
    """The answer that the client's retry gets."""
    call = Call(bench, spoken, body, headers=RETRY)
    await call.task
    assert call.sent[0]["status"] == 200
    return spoken.said(call.data)


async def nothing_runs(bench, until):
    await until(lambda: not busy(bench.proxy) and not bench.engine._live, "nothing runs for the client any more")


@each_dialect
@each_way
async def test_before_the_body_is_read_nothing_has_happened(start_bench, until, spoken, stream):
    bench = await start_bench(Play(HELLO))
    await bench.client()
    body = spoken.body(stream=stream)
    call = Call(bench, spoken, body, broken=True)
    call.hang_up()
    await call.task
    assert call.sent == []
    assert await bench.turns() == []
    await nothing_runs(bench, until)
    assert not bench.engine.requests
    assert await retried(bench, spoken, body) == "Hello"


@each_dialect
@each_way
async def test_while_the_request_is_placed_no_engine_is_asked(start_bench, until, monkeypatch, spoken, stream):
    bench = await start_bench(Play(HELLO))
    await bench.client()
    placing, go_on, place = threading.Event(), threading.Event(), Session.place

    def slow(*arguments):
        placing.set()
        assert go_on.wait(10)
        return place(*arguments)

    monkeypatch.setattr("proxy.live_session._LARGE_REQUEST", 0)
    monkeypatch.setattr(Session, "place", slow)
    body = spoken.body(stream=stream)
    call = Call(bench, spoken, body)
    await until(placing.is_set, "the request is being placed")
    call.hang_up()
    go_on.set()
    await call.task
    await nothing_runs(bench, until)
    assert (call.sent, bench.engine.requests) == ([], [])
    (turn,) = await bench.turns()
    assert (turn["status"], turn["completion_tokens"]) == ("aborted", 0)
    assert await retried(bench, spoken, body) == "Hello"
    assert len(await bench.turns()) == 1


@each_dialect
@each_way
async def test_while_it_is_held_no_engine_is_asked_when_a_route_opens(start_bench, until, spoken, stream):
    bench = await start_bench(Play(HELLO), route=False)
    await bench.client()
    body = spoken.body(stream=stream)
    call = Call(bench, spoken, body)
    await until(lambda: any(name.startswith("generation ") for name in busy(bench.proxy)), "it waits for a route")
    call.hang_up()
    await call.task
    await bench.route("open")
    await nothing_runs(bench, until)
    assert not bench.engine.requests
    assert (await bench.turns())[0]["status"] == "aborted"
    assert await retried(bench, spoken, body) == "Hello"
    assert len(bench.engine.requests) == 1


@each_dialect
@each_way
async def test_mid_stream_the_engine_is_aborted_by_its_request_id_alone(start_bench, until, spoken, stream):
    stalled = Fault("stall", 2)
    bench = await start_bench(Play(HELLO, fault=stalled), Play(toy_ids("other"), fault=stalled), Play(HELLO[2:]))
    await bench.client()
    body = spoken.body(stream=stream)
    call = Call(bench, spoken, body)
    await until(sent(bench.engine, 2), "two tokens")
    neighbour = Call(bench, spoken, spoken.body("other"))
    await until(lambda: len(bench.engine.requests) == 2, "another request runs beside it")
    call.hang_up()
    await call.task
    first, second = bench.engine.outputs.values()
    await until(lambda: first.finish == "abort", "the engine let go")
    assert (first.aborted, second.aborted) == (True, False)
    session = await bench.recorded()
    await until(lambda: session.turns[0].choices[0].status == "aborted", "so did the generation's owner")
    assert tuple(session.turns[0].choices[0].recording.ids) == HELLO[:2]
    assert not session.trainable()
    await bench.engine.release()
    await neighbour.task
    assert await retried(bench, spoken, body) == "Hello"
    assert session.trainable() == {turn.generation for turn in session.turns}


@each_dialect
@each_way
async def test_after_the_last_token_the_answer_is_kept_for_the_retry_and_not_trained_without(
    start_bench, until, spoken, stream
):
    bench = await start_bench(Play(HELLO, chunk=9), Play(toy_ids("no second one")))
    await bench.client()
    body, gate = spoken.body(stream=stream), asyncio.Event()
    call = Call(bench, spoken, body, gate=gate)
    session = await bench.recorded()
    await until(lambda: session.turns and session.turns[0].finished, "the generation has ended")
    call.hang_up()
    await call.task
    await nothing_runs(bench, until)
    assert call.sent == []
    turn = session.turns[0]
    assert tuple(turn.choices[0].recording.ids) == HELLO
    assert not session.trainable()
    await bench.restart()
    assert not (await bench.recorded()).trainable()
    assert await retried(bench, spoken, body) == "Hello"
    assert len(bench.engine.requests) == 1
    assert (await bench.recorded()).trainable() == {turn.generation}


async def test_what_a_client_left_is_masked_in_the_tree_and_no_prompt_runs_through_it(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(toy_ids("next")))
    await bench.client()
    call = Call(bench, CHAT, CHAT.body())
    await until(sent(bench.engine, 2), "two tokens")
    call.hang_up()
    await call.task
    await nothing_runs(bench, until)
    partial = {"role": "assistant", "content": "He"}
    body = CHAT.body() | {"messages": [*CHAT.body()["messages"], partial, {"role": "user", "content": "go on"}]}
    following = Call(bench, CHAT, body)
    await following.task
    assert CHAT.said(following.data) == "next"
    live = await bench.proxy.service.sessions.get(bench.session["session"])
    session = await live.seal()
    left, after = session.turns
    assert (left.choices[0].status, after.outcome.value) == ("aborted", "fork")
    spans = [session.tree.spans[index] for index in session.tree.path(after.prompt_end)]
    assert left.generation not in {span.generation for span in spans}
    (kept,) = [span for span in session.tree.spans if span.generation == left.generation]
    assert (tuple(kept.ids), kept.passable) == (HELLO[:2], False)
    assert session.trainable() == {after.generation}


@each_way
async def test_one_of_two_readers_may_go_and_the_other_gets_its_answer(start_bench, until, stream):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)))
    await bench.client()
    first = Call(bench, CHAT, CHAT.body(stream=stream))
    await until(sent(bench.engine, 2), "two tokens")
    second = Call(bench, CHAT, CHAT.body(stream=stream), headers=RETRY)
    live = await bench.proxy.service.sessions.get(bench.session["session"])
    await until(lambda: live._answering[0]._readers == 2, "both read")
    first.hang_up()
    await first.task
    assert not next(iter(bench.engine.outputs.values())).aborted
    await bench.engine.release()
    await second.task
    assert CHAT.said(second.data) == "Hello"
    session = await bench.recorded()
    assert session.trainable() == {session.turns[0].generation}


async def test_a_session_that_ends_while_an_answer_is_made_ends_the_answer(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)))
    await bench.client()
    call = Call(bench, CHAT, CHAT.body())
    await until(sent(bench.engine, 2), "two tokens")
    await bench.proxy.control.finish_session(bench.session["session"])
    await call.task
    assert call.sent[0]["status"] == 403
    await nothing_runs(bench, until)
    late = Call(bench, CHAT, CHAT.body(), headers=RETRY)
    await late.task
    assert late.sent[0]["status"] == 403
    assert len(bench.engine.requests) == 1


async def test_a_request_that_is_placed_while_its_session_ends_is_refused(start_bench, until, monkeypatch):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)))
    await bench.client()
    placing, go_on, place = threading.Event(), threading.Event(), Session.place

    def slow(*arguments):
        placement = place(*arguments)
        placing.set()
        assert go_on.wait(10)
        return placement

    monkeypatch.setattr("proxy.live_session._LARGE_REQUEST", 0)
    monkeypatch.setattr(Session, "place", slow)
    call = Call(bench, CHAT, CHAT.body())
    await until(placing.is_set, "the request has its place")
    ending = asyncio.create_task(bench.proxy.control.finish_session(bench.session["session"]))
    live = await bench.proxy.service.sessions.get(bench.session["session"])
    await until(lambda: live.sealing.locked() or live.ended, "the session is about to end")
    await asyncio.wait({ending}, timeout=0.1)
    go_on.set()
    async with asyncio.timeout(20):
        await asyncio.gather(ending, call.task)
    assert call.sent[0]["status"] == 403
    kinds = [row.kind for row in bench.proxy.service.journal.read(bench.session["session"])]
    assert kinds[-1] == "closed"
    await nothing_runs(bench, until)
