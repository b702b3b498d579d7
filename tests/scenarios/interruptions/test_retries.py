"""What a client sends again gets the answer it had: one generation, the same bytes, in every dialect."""

from __future__ import annotations

import asyncio

import aiohttp
import anthropic
import openai
import orjson
import pytest
from interruptions import Call, busy, sent
from spoken import CHAT, COMPLETIONS, DIALECTS, events

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello")
RETRY = {"x-stainless-retry-count": "1"}
KEY = {"idempotency-key": "k-1"}
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_dialect = pytest.mark.parametrize("spoken", DIALECTS, ids=str)


async def answer(bench, spoken, body, headers=None):
    """The bytes of one answer that was served."""
    call = Call(bench, spoken, body, headers=headers)
    await call.task
    assert call.sent[0]["status"] == 200
    return call.data


async def told_slowly(start_bench, until, spoken, body):
    """A bench and the bytes of an answer that came in three portions."""
    bench = await start_bench(
        Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:], fault=Fault("stall", 3)), Play(HELLO[5:])
    )
    await bench.client()
    asking = asyncio.create_task(answer(bench, spoken, body))
    for version in (1, 2):
        await until(lambda v=version: len(bench.engine.requests) == v and sent(bench.engine, 1 + v)(), "a portion")
        await bench.update_weights(version)
    return bench, await asking


@each_dialect
@each_way
async def test_a_finished_answer_is_told_again_byte_by_byte_and_after_a_restart(start_bench, until, spoken, stream):
    body = spoken.body(stream=stream)
    bench, first = await told_slowly(start_bench, until, spoken, body)
    assert spoken.said(first) == "Hello"
    assert await answer(bench, spoken, body, RETRY) == first
    await bench.restart()
    assert await answer(bench, spoken, body, {"x-stainless-retry-count": "2"}) == first
    assert len(bench.engine.requests) == 3
    assert len(await bench.turns()) == 1


@each_dialect
@each_way
async def test_a_retry_attaches_to_the_running_generation_and_hears_it_from_its_beginning(
    start_bench, until, spoken, stream
):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)))
    await bench.client()
    body = spoken.body(stream=stream)
    first = asyncio.create_task(answer(bench, spoken, body))
    await until(sent(bench.engine, 2), "two tokens")
    second = asyncio.create_task(answer(bench, spoken, body, RETRY))
    live = await bench.proxy.service.sessions.get(bench.session["session"])
    await until(lambda: live._answering[0]._readers == 2, "both read")
    await bench.engine.release()
    assert await first == await second
    assert spoken.said(await first) == "Hello"
    assert len(bench.engine.requests) == 1


@each_dialect
@each_way
async def test_an_answer_that_was_left_keeps_its_id_and_time_when_a_retry_finishes_it(
    start_bench, until, monkeypatch, spoken, stream
):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    await bench.client()
    body = spoken.body(stream=stream)
    call = Call(bench, spoken, body)
    await until(sent(bench.engine, 2), "two tokens")
    if stream:
        await until(lambda: spoken.said(call.data) == "He", "their text")
    call.hang_up()
    await call.task
    turn = (await bench.recorded()).turns[0]
    monkeypatch.setattr("time.time", lambda: 4e9)
    await bench.restart()
    again = await answer(bench, spoken, body, RETRY)
    assert spoken.said(again) == "Hello"
    assert spoken.identity(again)[0].endswith(turn.generation)
    assert set(spoken.identity(again)[1:]) <= {turn.created}
    if stream:
        assert spoken.identity(again) == spoken.identity(call.data)
        assert again.startswith(call.data)
    assert len(bench.engine.requests) == 2


@each_dialect
async def test_an_idempotency_key_needs_no_retry_header(start_bench, spoken):
    bench = await start_bench(Play(HELLO), Play(toy_ids("other")), Play(toy_ids("third")))
    await bench.client()
    first = await answer(bench, spoken, spoken.body(), KEY)
    assert await answer(bench, spoken, spoken.body(), KEY) == first
    assert await answer(bench, spoken, spoken.body(), {**KEY, **RETRY}) == first
    # Another key, or the same with another body, is another request.
    assert spoken.said(await answer(bench, spoken, spoken.body(), {"idempotency-key": "k-2"})) == "other"
    assert spoken.said(await answer(bench, spoken, spoken.body("ho"), KEY)) == "third"


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_the_vendors_clients_own_retries_are_one_generation(start_bench, kind):
    """A time-out as at 600 s; nobody tells the agent."""
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    client = await bench.client(timeout=0.5, max_retries=2)
    if kind == "openai":
        said = (await client.chat.completions.create(**CHAT.body())).choices[0].message.content
    else:
        options = {"base_url": client.base_url.join("..").__str__(), "api_key": client.api_key}
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(**options, timeout=0.5, max_retries=2, http_client=plain) as other:
            said = (await other.messages.create(**CHAT.body(), max_tokens=50)).content[0].text
    assert said == "Hello"
    (turn,) = await bench.turns()
    assert (turn["status"], turn["completion_tokens"]) == ("finished", len(HELLO))
    assert len(bench.engine.requests) == 2


@pytest.mark.parametrize("limit", [10.0, 3600.0])
async def test_a_hold_longer_than_the_client_s_patience_is_one_generation(start_bench, until, limit):
    """600 s at the vendor's clients; `hold_limit_s` may be longer, and counts anew for each retry."""
    bench = await start_bench(Play(HELLO), route=False, pipeline={"hold_limit_s": limit})
    client = await bench.client(timeout=0.3, max_retries=20)
    asking = asyncio.create_task(client.chat.completions.create(**CHAT.body()))
    session = await bench.recorded()
    await until(lambda: session.turns and session.turns[0].left, "the client has lost patience")
    await until(lambda: not session.turns[0].left, "and asks again")
    await until(lambda: session.turns[0].left, "and again")
    await bench.route("open")
    assert (await asking).choices[0].message.content == "Hello"
    assert (len(session.turns), len(bench.engine.requests)) == (1, 1)


async def test_a_hold_beyond_its_limit_is_final(start_bench):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.2})
    client = await bench.client(max_retries=2)
    with pytest.raises(openai.InternalServerError, match="hold_limit_s") as failure:
        await client.chat.completions.create(**CHAT.body())
    assert failure.value.response.headers["x-should-retry"] == "false"
    assert len(await bench.turns()) == 1


async def test_a_turn_that_failed_is_not_told_again_but_tried_anew(start_bench):
    bench = await start_bench(Play(HELLO), route=False, pipeline={"hold_limit_s": 0.2})
    await bench.client()
    failed = Call(bench, CHAT, CHAT.body())
    await failed.task
    assert failed.sent[0]["status"] == 504
    await bench.route("open")
    assert CHAT.said(await answer(bench, CHAT, CHAT.body(), RETRY)) == "Hello"
    assert [turn["status"] for turn in await bench.turns()] == ["failed", "finished"]


async def test_samples_drawn_by_asking_again_keep_apart_when_all_of_them_are_retried(start_bench, until):
    texts = ["one", "two", "six"]
    bench = await start_bench(*[Play(toy_ids(text), fault=Fault("stall", 1)) for text in texts])
    await bench.client()
    calls = [Call(bench, CHAT, CHAT.body()) for _ in texts]
    await until(lambda: [len(o.ids) for o in bench.engine.outputs.values()] == [1, 1, 1], "one token of each")
    for call in calls:
        call.hang_up()
        await call.task
    bench.engine.add(*[Play(toy_ids(text)[1:]) for text in reversed(texts)])  # a retry takes the latest first
    retries = [await answer(bench, CHAT, CHAT.body(), RETRY) for _ in texts]
    assert [CHAT.said(data) for data in retries] == list(reversed(texts))
    assert [turn["status"] for turn in await bench.turns()] == ["finished"] * 3


@pytest.mark.parametrize("spoken", [CHAT, COMPLETIONS], ids=str)
@each_way
async def test_several_choices_are_retried_together_after_a_restart(start_bench, until, spoken, stream):
    """One has ended, one was under way, one had not begun."""
    texts = ["Hello", "world", "again"]
    plays = [Play(toy_ids(texts[0])), Play(toy_ids(texts[1]), fault=Fault("stall", 2)), Play((), fault=Fault("stall"))]
    bench = await start_bench(*plays)
    await bench.client()
    body = spoken.body(n=3, stream=stream)
    call = Call(bench, spoken, body)
    await until(lambda: [len(o.ids) for o in bench.engine.outputs.values()] == [6, 2, 0], "that is where they stand")
    session = await bench.recorded()
    await until(lambda: [len(c.recording.ids) for c in session.turns[0].choices] == [6, 2, 0], "and are recorded")
    call.hang_up()
    await call.task
    await bench.restart()
    bench.engine.add(Play(toy_ids(texts[1])[2:]), Play(toy_ids(texts[2])))
    data = await answer(bench, spoken, body, RETRY)
    found = events(data) if stream else [orjson.loads(data)]
    said = dict.fromkeys(range(3), "")
    for one in found:
        for choice in one["choices"]:
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            said[choice["index"]] += part.get("content") or ""
    assert list(said.values()) == texts
    assert len(bench.engine.requests) == 5
    assert [choice["status"] for choice in (await bench.turns())[0]["choices"]] == ["finished"] * 3
    assert not busy(bench.proxy)


async def test_bytes_of_a_retry_over_the_network_are_the_same_too(start_bench):
    bench = await start_bench(Play(HELLO, chunk=2))
    await bench.client()
    url = f"{bench.proxy.url}/s/{bench.session['session']}{CHAT.path}"
    key = {"Authorization": f"Bearer {bench.session['api_key']}"}
    async with aiohttp.ClientSession(headers=key) as http:
        told = []
        for headers in ({}, RETRY):
            async with http.post(url, json=CHAT.body(stream=True), headers=headers) as reply:
                told.append(await reply.read())
    assert told[0] == told[1]
