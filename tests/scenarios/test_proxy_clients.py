"""Clients come, go, retry and send what they like. Numbers are rows of the case list."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Play

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


async def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(start_bench):
    """Stock HTTP clients give an idle one up after 5 s: a server that does so first breaks off the next request."""
    bench = await start_bench(Play(HELLO), Play(HELLO))
    await bench.client()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60)) as http:
        await post(http, bench)
        (connection,) = http.connector._conns.values()
        kept, _ = connection[0]
        await asyncio.sleep(6)
        assert kept.is_connected()
        status, _, _ = await post(http, bench)
    assert status == 200
