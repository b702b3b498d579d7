"""Who waits is kept waiting alive, in a way that each client understands; a failure never looks like an answer."""

from __future__ import annotations

import asyncio

import aiohttp
import anthropic
import openai
import orjson
import pytest
from interruptions import Call, sent
from spoken import CHAT, DIALECTS, MESSAGES

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello")
each_dialect = pytest.mark.parametrize("spoken", DIALECTS, ids=str)


@pytest.fixture
def impatient(monkeypatch):
    """Signs of life come after hundredths of a second."""
    monkeypatch.setattr("proxy.app.KEEP_ALIVE_S", 0.02)
    monkeypatch.setattr("proxy.app.WHOLE_KEEP_ALIVE_S", 0.04)


def lives(call, mark, times):
    return lambda: call.data.count(mark) >= times


@each_dialect
async def test_a_stream_that_waits_is_kept_alive_in_the_dialect_s_way(start_bench, until, impatient, spoken):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), route=False)
    await bench.client()
    call = Call(bench, spoken, spoken.body(stream=True))
    await until(lives(call, spoken.keep_alive, 3), "signs of life before a route is open")
    await bench.route("open")
    await until(sent(bench.engine, 2), "two tokens")
    await until(lambda: spoken.said(call.data) == "He", "their text")
    before = call.data.count(spoken.keep_alive)
    await until(lives(call, spoken.keep_alive, before + 2), "signs of life in the middle")
    await bench.engine.release()
    await call.task
    assert spoken.said(call.data) == "Hello"


@each_dialect
async def test_a_whole_answer_that_waits_is_kept_alive_by_white_space(start_bench, until, impatient, spoken):
    bench = await start_bench(Play(HELLO), route=False)
    await bench.client()
    call = Call(bench, spoken, spoken.body())
    await until(lives(call, b" ", 3), "signs of life")
    await bench.route("open")
    await call.task
    assert call.data.startswith(b"   ")
    assert spoken.text_of(orjson.loads(call.data)) == "Hello"


async def test_a_whole_answer_is_kept_alive_also_while_its_tokens_come(start_bench, impatient):
    bench = await start_bench(Play(toy_ids("slow but steady")), scripted={"delay_s": 0.02})
    await bench.client()
    call = Call(bench, CHAT, CHAT.body())
    await call.task
    assert call.data.startswith(b"  ")
    assert CHAT.said(call.data) == "slow but steady"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_vendors_clients_take_no_notice(start_bench, until, impatient, stream):
    bench = await start_bench(Play(HELLO), Play(HELLO), route=False)
    client = await bench.client()
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    base_url = f"{bench.proxy.url}/s/{bench.session['session']}"
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key, http_client=plain) as other:
        chat = asyncio.create_task(client.chat.completions.create(**CHAT.body(stream=stream)))
        message = asyncio.create_task(other.messages.create(**MESSAGES.body(stream=stream)))
        # A stream is there with its first sign of life, a whole answer only with its end.
        done, _ = await asyncio.wait(
            {chat, message}, timeout=None if stream else 0.2, return_when=asyncio.ALL_COMPLETED
        )
        assert len(done) == (2 if stream else 0)
        await bench.route("open")
        chat, message = await chat, await message
        if stream:
            assert "".join(c.choices[0].delta.content or "" for c in await bench.read(chat)) == "Hello"
            assert (
                "".join(e.delta.text for e in await bench.read(message) if e.type == "content_block_delta") == "Hello"
            )
        else:
            assert (chat.choices[0].message.content, message.content[0].text) == ("Hello", "Hello")


@each_dialect
async def test_an_answer_kept_alive_that_fails_breaks_the_connection(start_bench, impatient, spoken):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.2})
    await bench.client()
    url = f"{bench.proxy.url}/s/{bench.session['session']}{spoken.path}"
    key = {"Authorization": f"Bearer {bench.session['api_key']}"}
    async with aiohttp.ClientSession(headers=key) as http, http.post(url, json=spoken.body()) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert (await bench.turns())[0]["status"] == "failed"


async def test_the_vendor_s_client_sees_a_connection_error_then(start_bench, impatient):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.2})
    client = await bench.client()
    with pytest.raises((openai.APIConnectionError, openai.APIResponseValidationError)):
        await client.chat.completions.create(**CHAT.body())


@each_dialect
async def test_a_stream_kept_alive_that_fails_says_so_in_an_event(start_bench, impatient, spoken):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.2})
    await bench.client()
    call = Call(bench, spoken, spoken.body(stream=True))
    await call.task
    assert call.sent[0]["status"] == 200
    assert b"hold_limit_s" in call.data
    assert spoken.keep_alive in call.data
    assert not call.data.rstrip().endswith(b"[DONE]")


@each_dialect
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failure_before_any_sign_of_life_has_its_status(start_bench, spoken, stream):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.05})
    await bench.client()
    call = Call(bench, spoken, spoken.body(stream=stream))
    await call.task
    assert call.sent[0]["status"] == 504
    assert (b"x-should-retry", b"false") in call.sent[0]["headers"]
    assert "hold_limit_s" in orjson.loads(call.data)["error"]["message"]
