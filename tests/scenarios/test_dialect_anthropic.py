"""The stock Anthropic client against a real proxy. Numbers are rows of the case list."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import aiohttp
import anthropic
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

HI = {"role": "user", "content": "hi"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 41}}\n</tool_call>'
PLAIN = {"model": "any", "max_tokens": 200}


@pytest.fixture
async def connect():
    """`await connect(bench)`: a client of a new session; `session=` and other options are the client's."""
    async with AsyncExitStack() as stack:

        async def client(bench, session=None, **options):
            if session is None:
                session = bench.session = await bench.proxy.control.create_session("demo")
            # Loading certificate authorities takes longer than most scenarios; there is no TLS here.
            plain = anthropic.DefaultAsyncHttpxClient(verify=False)
            options = {"api_key": session["api_key"], "max_retries": 0, "timeout": 20, "http_client": plain, **options}
            base_url = f"{bench.proxy.url}/s/{session['session']}"
            return await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=base_url, **options))

        yield client


async def ask(client, *messages, stream=False, **more):
    """The final message; streamed, it is what the client's own reader of events makes of them."""
    request = {**PLAIN, "messages": list(messages) or [HI], **more}
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


def said(message):
    """The answer as the client sends it back."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


def results(message, *contents):
    """Results of the calls of `message`, last one first."""
    calls = [block for block in message.content if block.type == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": call.id, "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]
    return {"role": "user", "content": blocks[::-1]}


async def outcomes(bench):
    return [turn["outcome"] for turn in await bench.turns()]


def prompt_of(bench, index=-1):
    """What an engine's request asked, as text of the toy model."""
    return bytes(token - 3 for token in bench.engine.requests[index].ids if token > 2).decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_model_s_text_with_the_true_token_counts(start_bench, connect, stream):
    bench = await start_bench(Play(toy_ids("Hello")))
    answer = await ask(await connect(bench), stream=stream)
    assert [block.text for block in answer.content] == ["Hello"]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    (turn,) = await bench.turns()
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (turn["prompt_tokens"], 6)
    assert answer.usage.input_tokens == len(bench.engine.requests[0].ids)
    assert answer.id == f"msg_{turn['generation']}"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_tools_is_one_path_of_recorded_tokens(start_bench, connect, stream):
    texts = (f"Adding.\n{CALL}", "48 it is.", CALL, "Done.")
    bench = await start_bench(*[Play(toy_ids(text)) for text in texts])
    client = await connect(bench)
    asked = {"system": "Be brief.", "tools": [ADD], "stream": stream}
    history = [HI]
    first = await ask(client, *history, **asked)
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert first.content[1].input == {"a": 7, "b": 41}
    history += [said(first), results(first, "48")]
    second = await ask(client, *history, **asked)
    history += [said(second), {"role": "user", "content": [{"type": "text", "text": "again"}]}]
    third = await ask(client, *history, **asked)
    assert [block.type for block in third.content] == ["tool_use"]
    answered = results(third, "48")
    answered["content"].append({"type": "text", "text": "and stop"})
    fourth = await ask(client, *history, said(third), answered, **asked)
    assert fourth.content[0].text == "Done."
    assert await outcomes(bench) == ["root", "extend", "extend", "extend"]
    assert (await bench.inspect())["forks"] == 0
    for before, after, text in zip(bench.engine.requests, bench.engine.requests[1:], texts, strict=False):
        recorded = (*before.ids, *toy_ids(text))
        assert tuple(after.ids[: len(recorded)]) == recorded
    assert prompt_of(bench).endswith("tool\n48\nuser\nand stop\nassistant\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_results_of_parallel_calls_reach_the_model_in_the_order_of_the_calls(start_bench, connect, stream):
    bench = await start_bench(Play(toy_ids(CALL + "\n" + CALL)), Play(toy_ids("ok")))
    client = await connect(bench)
    first = await ask(client, tools=[ADD], stream=stream)
    assert [block.type for block in first.content] == ["tool_use", "tool_use"]
    assert len({block.id for block in first.content}) == 2
    await ask(client, HI, said(first), results(first, "one", "two"), tools=[ADD], stream=stream)
    assert prompt_of(bench).endswith("tool\none\ntool\ntwo\nassistant\n")
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ({"type": "any"}, 'add", "arguments": {"a": 7, "b": 41}}\n</tool_call>'),
        ({"type": "tool", "name": "add"}, '{"a": 7, "b": 41}}\n</tool_call>'),
    ],
)
async def test_case_49_a_forced_call_is_a_tool_use_and_going_on_extends(start_bench, connect, stream, choice, written):
    bench = await start_bench(Play(toy_ids(written)), Play(toy_ids("48")))
    client = await connect(bench)
    first = await ask(client, tools=[ADD], tool_choice=choice, stream=stream)
    assert [(block.type, block.input) for block in first.content] == [("tool_use", {"a": 7, "b": 41})]
    assert first.stop_reason == "tool_use"
    await ask(client, HI, said(first), results(first, "48"), tools=[ADD], stream=stream)
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_an_answer_ends_with_its_first_and_without_tools_a_call_is_text(
    start_bench, connect, stream
):
    bench = await start_bench(*[Play(toy_ids(CALL + "\n" + CALL))] * 2)
    client = await connect(bench)
    one = await ask(client, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, stream=stream)
    assert [block.type for block in one.content] == ["tool_use"]
    none = await ask(client, tools=[ADD], tool_choice={"type": "none"}, stream=stream)
    assert [block.type for block in none.content] == ["text"]


@pytest.mark.parametrize("shown", [{}, {"display": "omitted"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_comes_in_its_own_block_and_going_on_extends(start_bench, connect, stream, shown):
    texts = ("<think>\nSum.\n</think>\n\n48", "ok")
    bench = await start_bench(*[Play(toy_ids(text)) for text in texts], model={"reasoning_parser": "think"})
    client = await connect(bench)
    asked = {"thinking": {"type": "adaptive", **shown}, "stream": stream}
    first = await ask(client, **asked)
    assert [block.type for block in first.content] == ["thinking", "text"]
    assert first.content[0].thinking.strip() == ("" if shown else "Sum.")
    assert first.content[0].signature
    assert first.content[1].text.strip() == "48"
    await ask(client, HI, said(first), {"role": "user", "content": "more"}, **asked)
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("beta", [False, True])
async def test_case_76_a_count_is_the_length_of_the_prompt_that_a_call_records_and_leaves_nothing(
    start_bench, connect, beta
):
    bench = await start_bench(Play(toy_ids(CALL)), Play(toy_ids("48")))
    client = await connect(bench)
    counter = client.beta.messages if beta else client.messages
    asked = {"system": "Be brief.", "tools": [ADD]}
    history = [HI]
    for turn in range(2):
        size = (await bench.recorded()).tree.size
        counted = (await counter.count_tokens(model="any", messages=history, **asked)).input_tokens
        assert (await bench.recorded()).tree.size == size
        assert len(await bench.turns()) == turn
        answer = await ask(client, *history, **asked)
        assert counted == answer.usage.input_tokens == (await bench.turns())[turn]["prompt_tokens"]
        if not turn:
            history += [said(answer), results(answer, "48")]
    assert await outcomes(bench) == ["root", "extend"]


async def test_case_76_the_beta_api_is_the_same_api(start_bench, connect):
    bench = await start_bench(Play(toy_ids("Hello")))
    client = await connect(bench)
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = await client.beta.messages.create(
        **PLAIN, messages=[HI], betas=["context-management-2025-06-27"], context_management=keep_all
    )
    assert answer.content[0].text == "Hello"


async def test_case_44_a_billing_header_that_changes_reaches_neither_the_prompt_nor_the_match(start_bench, connect):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")), Play(toy_ids("three")))
    client = await connect(bench)

    def system(nonce):
        header = f"x-anthropic-billing-header: cc_version=2.1.175.f2a; cc_entrypoint=cli; cch={nonce};"
        return [{"type": "text", "text": header}, {"type": "text", "text": "You are an agent."}]

    first = await ask(client, system=system("36ee5"))
    await ask(client, system=system("0aaa9"))
    await ask(client, HI, said(first), {"role": "user", "content": "more"}, system=system("71fea"))
    one, two, _ = bench.engine.requests
    assert one.ids == two.ids
    assert "billing" not in prompt_of(bench)
    assert await outcomes(bench) == ["root", "root", "extend"]


async def test_case_77_system_and_content_as_blocks_or_as_strings_are_the_same_prompt(start_bench, connect):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    client = await connect(bench)
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("h", "i")]
    await ask(client, system="hi")
    await ask(client, {"role": "user", "content": blocks}, system=blocks)
    one, two = bench.engine.requests
    assert one.ids == two.ids


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_and_limits_are_told(start_bench, connect, stream):
    bench = await start_bench(Play(toy_ids("one.two")), Play(toy_ids("abcdef")))
    client = await connect(bench)
    stopped = await ask(client, stop_sequences=["."], stream=stream)
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one", "stop_sequence", ".")
    cut = await ask(client, max_tokens=3, stream=stream)
    assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("abc", "max_tokens", 3)


async def test_a_schema_for_the_answer_reaches_the_engine(start_bench, connect):
    bench = await start_bench(Play(toy_ids('{"a": 1}')), engine={"kind": "scripted"})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(await connect(bench), output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(bench.engine.requests[0].json_schema) == schema


async def test_a_retry_gets_the_same_bytes(start_bench, connect):
    bench = await start_bench(Play(toy_ids(CALL), chunk=10))
    await connect(bench)
    url = f"{bench.proxy.url}/s/{bench.session['session']}/v1/messages?beta=true"
    body = {**PLAIN, "messages": [HI], "tools": [ADD], "stream": True}
    bodies = []
    async with aiohttp.ClientSession() as http:
        for retries in ("0", "1"):
            headers = {"x-api-key": bench.session["api_key"], "x-stainless-retry-count": retries}
            async with http.post(url, json=body, headers=headers) as answer:
                bodies.append(await answer.read())
    assert bodies[0] == bodies[1]
    assert bodies[0].startswith(b"event: message_start\n")
    assert bodies[0].endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert len(bench.engine.requests) == 1


async def test_a_stream_that_waits_for_a_route_is_kept_open_by_pings(start_bench, connect, monkeypatch):
    monkeypatch.setattr("proxy.app.KEEP_ALIVE_S", 0.02)
    bench = await start_bench(Play(toy_ids("Hello")), route=False)
    client = await connect(bench)
    url = f"{bench.proxy.url}/s/{bench.session['session']}/v1/messages"
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            url, json={**PLAIN, "messages": [HI], "stream": True}, headers={"x-api-key": client.api_key}
        ) as answer,
    ):
        await answer.content.readuntil(b'event: ping\ndata: {"type":"ping"}\n\n')
        await bench.proxy.open_route(bench.engine.url)
        rest = await answer.content.read()
    assert rest.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_a_failure_in_a_stream_is_an_error_event_and_before_it_a_status(start_bench, connect):
    bench = await start_bench(Play(toy_ids("Hello"), fault=Fault("death", 2)), pipeline={"hold_limit_s": 0.3})
    client = await connect(bench)
    with pytest.raises(anthropic.APIStatusError) as failure:
        await ask(client, stream=True)
    assert failure.value.body["error"]["type"] == "timeout_error"
    assert failure.value.response.status_code == 200
    with pytest.raises(anthropic.APIStatusError) as failure:
        await ask(client, {"role": "user", "content": "anew"})
    assert failure.value.response.status_code == 504
    assert failure.value.response.headers["x-should-retry"] == "false"


async def test_case_30_too_long_a_prompt_is_refused_in_the_vendor_s_words_and_is_no_turn(start_bench, connect):
    bench = await start_bench()
    client = await connect(bench)
    with pytest.raises(anthropic.BadRequestError) as failure:
        await ask(client, {"role": "user", "content": "x" * 500})
    tokens = (
        await client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "x" * 500}])
    ).input_tokens
    assert failure.value.body["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {tokens} tokens > 400 maximum",
    }
    assert await bench.turns() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.5),
        ("container", "box"),
        ("mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}]),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]),
        ("seed", 1),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(start_bench, connect, name, value):
    bench = await start_bench()
    with pytest.raises(anthropic.BadRequestError, match=name) as failure:
        await ask(await connect(bench), extra_body={name: value})
    assert failure.value.body["error"]["type"] == "invalid_request_error"
    assert await bench.turns() == []


async def test_keys_come_as_x_api_key_or_as_bearer_and_wrong_ones_are_refused_in_shape(start_bench, connect):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    await ask(await connect(bench))
    session = bench.session
    bearer = await connect(bench, session, api_key=None, auth_token=session["api_key"])
    assert (await ask(bearer)).content[0].text == "two"
    with pytest.raises(anthropic.AuthenticationError) as failure:
        await ask(await connect(bench, session, api_key="sfs_wrong"))
    assert failure.value.body["error"]["type"] == "authentication_error"
    await bench.proxy.control.finish_session(session["session"])
    with pytest.raises(anthropic.PermissionDeniedError) as failure:
        await ask(bearer)
    assert failure.value.body["error"]["type"] == "permission_error"


async def test_the_model_is_listed_and_what_is_not_served_is_not_found_in_shape(start_bench, connect):
    bench = await start_bench()
    client = await connect(bench)
    (model,) = (await client.models.list()).data
    assert (await client.models.retrieve(model.id)).id == model.id
    with pytest.raises(anthropic.NotFoundError) as failure:
        await client.messages.batches.list()
    assert failure.value.body["error"]["type"] == "not_found_error"
