"""Clients come, go, retry and send what they like. Numbers are rows of the case list."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import orjson
import pytest

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
async def test_09_10_60_when_the_client_goes_the_engine_is_freed_and_the_tokens_stay(start_bench, until, stream):
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


async def test_63_an_answer_that_the_client_left_is_not_extended(start_bench, until):
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


async def test_15_the_same_body_without_the_retry_header_is_two_generations(start_bench):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        _, _, first = await post(http, bench)
        _, _, second = await post(http, bench)
    assert len(bench.engine.requests) == 2
    assert [orjson.loads(data)["choices"][0]["message"]["content"] for data in (first, second)] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_15_a_retry_of_a_finished_request_gets_the_same_bytes_and_no_second_generation(start_bench, stream):
    bench = await start_bench(Play(HELLO, chunk=10))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        _, _, first = await post(http, bench, {**BODY, "stream": stream})
        _, _, second = await post(http, bench, {**BODY, "stream": stream}, **{"x-stainless-retry-count": "1"})
    assert len(bench.engine.requests) == 1
    assert first == second


async def test_15_16_a_retry_attaches_to_the_running_generation(start_bench, until):
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


async def test_14_16_a_retry_after_a_client_time_out_continues_what_was_left(start_bench):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    client = await bench.client(timeout=0.5, max_retries=1)
    answer = await client.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "Hello"
    (turn,) = await bench.turns()
    assert turn["status"] == "finished"
    assert turn["completion_tokens"] == len(HELLO)


async def test_66_headers_of_the_engine_are_not_echoed(start_bench):
    bench = await start_bench(Play(HELLO), Play(HELLO))
    await bench.client()
    async with aiohttp.ClientSession() as http:
        for stream in (False, True):
            _, headers, _ = await post(http, bench, {**BODY, "stream": stream})
            for name in ("server", "date", "content-length", "content-type"):
                assert len(headers.getall(name, [])) <= 1
            assert "aiohttp" not in headers.get("server", "").lower()


async def test_75_21_every_chunk_has_a_null_finish_reason_until_the_last_and_usage_comes_only_when_asked(start_bench):
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
async def test_78_the_token_limit_is_the_smaller_one_asked_or_the_room_that_is_left(start_bench, asked, used):
    bench = await start_bench(Play(HELLO), sampling={"max_tokens": 100000})
    await bench.ask(**asked)
    assert bench.engine.requests[0].max_new_tokens == used


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1),
        ("response_format", {"type": "json_object"}),
        ("store", True),
        ("best_of", 2),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(start_bench, add_tool, name, value):
    bench = await start_bench()
    with pytest.raises(openai.BadRequestError) as failure:
        await bench.ask(tools=[add_tool], logprobs=True, extra_body={name: value})
    assert failure.value.param == name
    assert failure.value.code == "unsupported_parameter"
    assert await bench.turns() == []


async def test_values_that_ask_for_nothing_are_accepted(start_bench):
    bench = await start_bench(Play(HELLO))
    await bench.ask(n=1, presence_penalty=0, response_format={"type": "text"}, user="me", metadata={"a": "b"})
    assert (await bench.turns())[0]["asked"]["labels"] == {"user": "me", "metadata": {"a": "b"}}


async def test_the_turn_limit_is_refused_in_the_dialect_s_shape(start_bench):
    bench = await start_bench(Play(HELLO), agent={"max_turns": 1})
    client = await bench.client()
    await client.chat.completions.create(**BODY)
    with pytest.raises(openai.BadRequestError, match="max_turns"):
        await client.chat.completions.create(**BODY)


async def test_keys_open_their_own_session_only(start_bench):
    bench = await start_bench(Play(HELLO))
    client = await bench.client()
    mine = bench.session
    other = await bench.proxy.control.create_session("demo")
    with pytest.raises(openai.AuthenticationError):
        await bench.client_of({**mine, "api_key": "sfs_wrong"}).chat.completions.create(**BODY)
    with pytest.raises(openai.AuthenticationError):
        await bench.client_of({**mine, "api_key": other["api_key"]}).chat.completions.create(**BODY)
    await bench.proxy.control.finish_session(mine["session"])
    with pytest.raises(openai.PermissionDeniedError) as failure:
        await client.chat.completions.create(**BODY)
    assert failure.value.code == "session_closed"


async def test_a_key_alone_names_its_session(start_bench):
    bench = await start_bench(Play(HELLO))
    await bench.client()
    client = openai.AsyncOpenAI(base_url=f"{bench.proxy.url}/v1", api_key=bench.session["api_key"], max_retries=0)
    async with client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        await client.chat.completions.create(**BODY)
    assert len(await bench.turns()) == 1


async def test_an_unknown_path_is_told_in_the_dialect_s_shape(start_bench):
    bench = await start_bench()
    client = await bench.client()
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        await client.embeddings.create(model="any", input="x")


async def test_a_stream_that_waits_for_a_route_is_kept_open_by_comments(start_bench, monkeypatch):
    monkeypatch.setattr("proxy.app.KEEP_ALIVE_S", 0.02)
    bench = await start_bench(Play(HELLO), route=False)
    await bench.client()
    body = {**BODY, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url_of(bench), json=body, headers=headers_of(bench)) as answer,
    ):
        before = await answer.content.readuntil(b": keep-alive\n\n")
        await bench.proxy.open_route(bench.engine.url)
        rest = (before + await answer.content.read()).decode()
    chunks = [orjson.loads(line[6:]) for line in rest.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello"


async def test_86_many_requests_held_through_a_weight_update_all_complete_once(start_bench):
    bench = await start_bench(route=False)
    sessions = [await bench.proxy.control.create_session("demo") for _ in range(40)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(session):
            url = f"{bench.proxy.url}/s/{session['session']}/v1/chat/completions"
            key = {"Authorization": f"Bearer {session['api_key']}"}
            async with http.post(url, json={**BODY, "max_tokens": 3}, headers=key) as answer:
                return answer.status

        asking = [asyncio.create_task(ask(session)) for session in sessions]
        await asyncio.sleep(0.2)
        assert not bench.engine.requests
        await bench.proxy.open_route(bench.engine.url)
        assert await asyncio.gather(*asking) == [200] * 40
    assert len(bench.engine.requests) == 40
