"""The stock OpenAI client speaks Responses to a real proxy. Numbers are rows of the case list."""

from __future__ import annotations

import openai
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
PATCH = {"type": "custom", "name": "patch"}
USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
THINK = {"model": {"reasoning_parser": "think"}}


def call(arguments, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def plays(*texts):
    return [Play(toy_ids(text)) for text in texts]


async def ask(client, *items, **more):
    return await client.responses.create(model="any", input=list(items) or "hi", **more)


async def outcomes(bench):
    return [turn["outcome"] for turn in await bench.turns()]


def sent_back(response):
    """Output items as a client sends them that keeps no ids of ours (Codex)."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    for item in items:
        item.pop("id")
        if item["type"] == "reasoning":
            item.pop("content", None)
    return items


async def test_an_answer_whole_and_streamed_is_the_same(start_bench):
    bench = await start_bench(*plays("Hello", "Hello"))
    client = await bench.client()
    whole = await ask(client)
    assert (whole.output_text, whole.status, whole.usage.output_tokens) == ("Hello", "completed", 6)
    events = await bench.read(await ask(client, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    known = {"id", "created_at", "output"}
    assert last.response.model_dump(exclude=known) == whole.model_dump(exclude=known)
    assert last.response.output_text == "Hello"


async def test_the_sdk_s_stream_helper_finds_the_final_response(start_bench):
    bench = await start_bench(*plays("Sum:" + call('{"a": 7, "b": 41}')))
    client = await bench.client()
    async with client.responses.stream(model="any", input="hi", tools=[ADD]) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].parsed_arguments == {"a": 7, "b": 41}


async def test_a_token_limit_makes_the_response_incomplete(start_bench):
    bench = await start_bench(*plays("Hello"))
    response = await ask(await bench.client(), max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "He"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_51_an_answer_with_a_call_is_gone_on_from_by_its_id_and_nothing_forks(start_bench, stream):
    bench = await start_bench(*plays(call('{"a": 7, "b": 41}'), "48"))
    client = await bench.client()
    first = await ask(client, tools=[ADD], stream=stream)
    if stream:
        first = (await bench.read(first))[-1].response
    (item,) = first.output
    assert (item.type, item.name, item.arguments) == ("function_call", "add", '{"a": 7, "b": 41}')
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "48"}
    second = await ask(client, result, tools=[ADD], previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("48", first.id)
    one, two = bench.engine.requests
    recorded = (*one.ids, *toy_ids(call('{"a": 7, "b": 41}'), end=False), 2)
    assert two.ids[: len(recorded)] == recorded
    added = (*toy_ids("\n", end=False), 1, *toy_ids("tool\n48"), *toy_ids("\n", end=False), 1)
    assert two.ids[len(recorded) :] == added + toy_ids("assistant\n", end=False)
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_82_a_client_that_stores_nothing_and_sends_all_items_again_reaches_the_same_place(
    start_bench, stream
):
    bench = await start_bench(*plays(call('{"a": 7, "b": 41}'), "48", "48"))
    client = await bench.client()
    first = await ask(client, USER, tools=[ADD], instructions="Be brief.")
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "48"}
    asked = {"tools": [ADD], "instructions": "Be brief.", "stream": stream}
    for_id = await ask(client, result, previous_response_id=first.id, **asked)
    for_items = await ask(client, USER, *sent_back(first), result, store=False, **asked)
    if stream:
        await bench.read(for_id)
        await bench.read(for_items)
    _, by_id, by_items = bench.engine.requests
    assert by_id.ids == by_items.ids
    assert await outcomes(bench) == ["root", "extend", "extend"]
    session = await bench.recorded()
    assert session.turns[1].prompt_end == session.turns[2].prompt_end


async def test_case_82_instructions_are_those_of_the_request_and_not_of_the_one_before(start_bench):
    bench = await start_bench(*plays("one", "two", "three"))
    client = await bench.client()
    first = await ask(client, instructions="Be brief.")
    await ask(client, MORE, instructions="Be brief.", previous_response_id=first.id)
    await ask(client, MORE, instructions="Be long.", previous_response_id=first.id)
    assert await outcomes(bench) == ["root", "extend", "root"]
    session = await bench.recorded()
    texts = [message.content for message in session.conversations.messages(session.turns[2])]
    assert texts == ["Be long.", "hi", "one", "more"]


async def test_case_51_an_unknown_id_and_one_that_was_not_stored_are_404(start_bench):
    bench = await start_bench(*plays("Hello"))
    client = await bench.client()
    unstored = await ask(client, store=False)
    for name in ("resp_0123456789abcdef", "nonsense", unstored.id):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(client, MORE, previous_response_id=name)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert len(bench.engine.requests) == 1


async def test_case_51_a_response_of_another_session_is_404(start_bench):
    bench = await start_bench(*plays("Hello"))
    first = await ask(await bench.client())
    with pytest.raises(openai.NotFoundError):
        await ask(await bench.client(), MORE, previous_response_id=first.id)


@pytest.mark.parametrize("include", [["reasoning.encrypted_content"], []])
async def test_case_80_reasoning_comes_back_sealed_or_as_text_and_the_conversation_goes_on(start_bench, include):
    bench = await start_bench(*plays("<think>Hm.</think>Hello", "ok"), **THINK)
    client = await bench.client()
    events = await bench.read(await ask(client, USER, include=include, store=False, stream=True))
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."
    first = events[-1].response
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.usage.output_tokens_details.reasoning_tokens >= len("<think>Hm.")
    assert bool(first.output[0].encrypted_content) == bool(include)
    items = sent_back(first) if include else [item.model_dump(exclude_none=True) for item in first.output]
    await ask(client, USER, *items, MORE, store=False)
    assert await outcomes(bench) == ["root", "extend"]
    session = await bench.recorded()
    assert session.conversations.messages(session.turns[1])[1].reasoning == "Hm."


async def test_a_custom_tool_is_called_with_text(start_bench):
    bench = await start_bench(*plays(call('{"input": "say \\"x\\""}', "patch"), "done"))
    client = await bench.client()
    first = await ask(client, USER, tools=[PATCH], store=False)
    (item,) = first.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", 'say "x"')
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    await ask(client, USER, *sent_back(first), result, tools=[PATCH], store=False)
    assert await outcomes(bench) == ["root", "extend"]


async def test_results_of_parallel_calls_may_come_in_any_order(start_bench):
    calls = call('{"a": 1, "b": 2}') + "\n" + call('{"a": 3, "b": 4}')
    bench = await start_bench(*plays(calls, "ok"))
    client = await bench.client()
    first = await ask(client, tools=[ADD])
    ids = [item.call_id for item in first.output]
    results = [{"type": "function_call_output", "call_id": ids[at], "output": str(3 + 4 * at)} for at in (1, 0)]
    await ask(client, *results, tools=[ADD], previous_response_id=first.id)
    session = await bench.recorded()
    assert [message.content for message in session.conversations.messages(session.turns[1])[2:]] == ["3", "7"]


async def test_log_probabilities_are_those_of_the_recorded_tokens(start_bench):
    bench = await start_bench(*plays("ok", "ok"))
    client = await bench.client()
    asked = {"include": ["message.output_text.logprobs"]}
    whole = await ask(client, **asked)
    streamed = (await bench.read(await ask(client, stream=True, **asked)))[-1].response
    for response in (whole, streamed):
        entries = response.output[0].content[0].logprobs
        assert [(entry.token, entry.logprob) for entry in entries] == [("o", -0.25), ("k", -0.5)]


async def test_what_is_not_supported_is_refused_with_the_parameter_s_name(start_bench):
    bench = await start_bench()
    client = await bench.client()
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0]"
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, {"role": "user", "content": "x" * 500})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_a_failure_in_the_stream_raises_in_the_client(start_bench):
    broken = Play(toy_ids("Hello"), fault=Fault("death", 2))
    bench = await start_bench(broken, pipeline={"hold_limit_s": 0.3})
    stream = await ask(await bench.client(), stream=True)
    with pytest.raises(openai.APIError):
        await bench.read(stream)
