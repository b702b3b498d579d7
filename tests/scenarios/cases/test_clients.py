"""Rows about clients: they come, go, retry, wait and read what they like."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson
import pytest
from interruptions import Call
from spoken import DIALECTS, events

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello")
BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


def url_of(bench):
    return f"{bench.proxy.url}/s/{bench.session['session']}/v1/chat/completions"


def headers_of(bench, **more):
    return {"Authorization": f"Bearer {bench.session['api_key']}", **more}


async def post(http, bench, body=BODY, **headers):
    """(status, headers, bytes) of one raw request."""
    async with http.post(url_of(bench), json=body, headers=headers_of(bench, **headers)) as answer:
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_09_10_60_when_the_client_goes_the_engine_is_freed_and_the_tokens_stay(start_bench, until, stream):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(toy_ids("next")))
    client = await bench.client()
    asking = asyncio.create_task(client.chat.completions.create(**BODY, stream=stream))
    await until(lambda: any(len(o.ids) == 2 for o in bench.engine.outputs.values()), "two tokens")
    if stream:
        answer = await asking
        await anext(aiter(answer))
        await answer.close()
    else:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    output = next(iter(bench.engine.outputs.values()))
    await until(lambda: output.aborted or not bench.engine._live, "the engine let go")
    assert bench.engine.requests[0].stream
    following = await client.chat.completions.create(**BODY)
    assert following.choices[0].message.content == "next"
    turns = await bench.turns()
    assert [turn["status"] for turn in turns] == ["aborted", "finished"]
    assert turns[0]["completion_tokens"] == 2


async def test_case_63_an_answer_that_the_client_left_is_not_extended(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(toy_ids("next")))
    client = await bench.client()
    stream = await client.chat.completions.create(**BODY, stream=True)
    await until(lambda: any(len(o.ids) == 2 for o in bench.engine.outputs.values()), "two tokens")
    await stream.close()
    messages = [*BODY["messages"], {"role": "assistant", "content": "He"}, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="any", messages=messages)
    turns = await bench.turns()
    assert turns[1]["outcome"] == "fork"
    assert "answer_differs" in turns[1]["reason"]
    session = await bench.recorded()
    assert not any(
        s.generation == turns[0]["generation"]
        for s in map(session.tree.spans.__getitem__, session.tree.path(session.turns[1].prompt_end))
    )


async def test_case_15_the_same_body_without_the_retry_header_is_two_generations(start_bench):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        _, _, first = await post(http, bench)
        _, _, second = await post(http, bench)
    assert len(bench.engine.requests) == 2
    assert [orjson.loads(data)["choices"][0]["message"]["content"] for data in (first, second)] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_15_a_retry_of_a_finished_request_gets_the_same_bytes_and_no_second_generation(start_bench, stream):
    bench = await start_bench(Play(HELLO, chunk=10))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        _, _, first = await post(http, bench, {**BODY, "stream": stream})
        _, _, second = await post(http, bench, {**BODY, "stream": stream}, **{"x-stainless-retry-count": "1"})
    assert len(bench.engine.requests) == 1
    assert first == second


async def test_case_15_16_a_retry_attaches_to_the_running_generation(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        first = asyncio.create_task(post(http, bench))
        await until(lambda: any(len(o.ids) == 2 for o in bench.engine.outputs.values()), "two tokens")
        retry = asyncio.create_task(post(http, bench, **{"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.05)
        await bench.engine.release()
        assert (await first)[2] == (await retry)[2]
    assert len(bench.engine.requests) == 1


async def test_case_66_headers_of_the_engine_are_not_echoed(start_bench):
    bench = await start_bench(Play(HELLO), Play(HELLO))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        for stream in (False, True):
            _, headers, _ = await post(http, bench, {**BODY, "stream": stream})
            for name in ("server", "date", "content-length", "content-type"):
                assert len(headers.getall(name, [])) <= 1
            assert "aiohttp" not in headers.get("server", "").lower()


async def test_case_75_21_every_chunk_has_a_null_finish_reason_until_the_last_and_usage_comes_only_when_asked(
    start_bench,
):
    bench = await start_bench(Play(HELLO), Play(HELLO))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            _, _, data = await post(http, bench, {**BODY, "stream": True, **options})
            events = [line[6:] for line in data.decode().split("\n\n") if line]
            assert events.pop() == "[DONE]"
            chunks = [orjson.loads(event) for event in events]
            if options:
                usage = chunks.pop()
                assert usage["choices"] == []
                assert usage["usage"] == {"prompt_tokens": 21, "completion_tokens": 6, "total_tokens": 27}
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["stop"]
            assert not any(chunk.get("usage") for chunk in chunks)


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 5),
        ({}, 400 - 21),
        ({"max_tokens": 100000}, 400 - 21),
    ],
)
async def test_case_78_the_token_limit_is_the_smaller_one_asked_or_the_room_that_is_left(start_bench, asked, used):
    bench = await start_bench(Play(HELLO), sampling={"max_tokens": 100000})
    await bench.ask(**asked)
    assert bench.engine.requests[0].max_new_tokens == used


async def test_case_86_three_hundred_requests_held_through_a_weight_update_all_complete_once(start_bench, until):
    begun = Play(HELLO, fault=Fault("stall", 2))
    bench = await start_bench(*[begun] * 100, scripted={"respond": lambda r: Play(HELLO[2 * (len(r.ids) == 23) :])})
    sessions = [await bench.proxy.control.create_session("demo") for _ in range(30)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(session):
            url = f"{bench.proxy.url}/s/{session['session']}/v1/chat/completions"
            key = {"Authorization": f"Bearer {session['api_key']}"}
            async with http.post(url, json=BODY, headers=key) as answer:
                return answer.status, (await answer.json())["choices"][0]["message"]["content"]

        asking = [asyncio.create_task(ask(session)) for session in sessions[:10] * 10]
        await until(lambda: sum(len(o.ids) for o in bench.engine.outputs.values()) == 200, "a hundred are cut")
        await bench.route("closed")
        asking += [asyncio.create_task(ask(session)) for session in sessions[10:] * 10]
        live = bench.proxy.service.sessions.live("demo")
        await until(lambda: sum(one.running() for one in live) == 300, "all are held")
        assert len(bench.engine.requests) == 100
        bench.engine.version = "1"
        await bench.route("open", 1)
        assert await asyncio.gather(*asking) == [(200, "Hello")] * 300
    assert len(bench.engine.requests) == 400
    assert sum(len(one.session.turns) for one in live) == 300


@pytest.mark.parametrize("spoken", DIALECTS, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_case_16_errors_are_final_for_the_vendors_clients(start_bench, spoken, stream):
    """They repeat 408, 409, 429 and 5xx unless they are told not to; each of ours would be the same again."""
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.05})
    await bench.client()
    bodies = [spoken.body(stream=stream), spoken.body(stream=stream, temperature="hot")]
    statuses = []
    for body in bodies:
        call = Call(bench, spoken, body)
        await call.task
        statuses.append(call.sent[0]["status"])
        assert (b"x-should-retry", b"false") in call.sent[0]["headers"]
    bench.session = {**bench.session, "api_key": "sfs_wrong"}
    call = Call(bench, spoken, bodies[0])
    await call.task
    assert (b"x-should-retry", b"false") in call.sent[0]["headers"]
    assert [*statuses, call.sent[0]["status"]] == [504, 400, 401]


@pytest.mark.parametrize("spoken", DIALECTS, ids=str)
async def test_case_03_a_stream_holds_nothing_but_the_dialect_s_own_events(start_bench, spoken):
    """The ids come with each event of the engine's native endpoint, so there is no late chunk of them to forward."""
    bench = await start_bench(Play(HELLO))
    await bench.client()
    call = Call(bench, spoken, spoken.body(stream=True))
    await call.task
    assert spoken.said(call.data) == "Hello"
    for event in events(call.data):
        assert not {"output_ids", "meta_info", "token_ids", "sglext"} & set(event)
        assert event.get("choices") != []
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == HELLO
