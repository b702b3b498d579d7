"""Turns of one conversation: what extends, what forks, and what the tree holds. Numbers are rows of the case list."""

from __future__ import annotations

import numpy as np
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Play

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}


def call(arguments, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def ask(client, *messages, **more):
    answer = await client.chat.completions.create(model="any", messages=list(messages), **more)
    return answer.choices[0]


async def outcomes(bench):
    return [turn["outcome"] for turn in await bench.turns()]


async def test_a_second_turn_is_the_recorded_ids_of_the_first_and_the_new_messages_only(start_bench):
    # The engine wrote "add" as three tokens of its own choice: rendering the text again would give other ids.
    bench = await start_bench(Play((*toy_ids("a", end=False), 0, *toy_ids("b"))), Play(toy_ids("ok")))
    client = await bench.client()
    first = await ask(client, SYSTEM, USER)
    await ask(client, SYSTEM, USER, first.message.model_dump(), {"role": "user", "content": "more"})
    one, two = bench.engine.requests
    recorded = [*one.ids, *toy_ids("a", end=False), 0, *toy_ids("b")]
    assert list(two.ids[: len(recorded)]) == recorded
    expected = (*toy_ids("\n", end=False), 1, *toy_ids("user\nmore"), *toy_ids("\n", end=False))
    assert tuple(two.ids[len(recorded) :]) == (*expected, 1, *toy_ids("assistant\n", end=False))
    assert await outcomes(bench) == ["root", "extend"]
    session = await bench.recorded()
    assert session.tree.depth(session.turns[1].choices[0].end) == len(two.ids) + 3


async def test_an_answer_cut_by_its_limit_can_be_followed(start_bench):
    bench = await start_bench(Play(toy_ids("abcdef")), Play(toy_ids("ok")))
    client = await bench.client()
    first = await ask(client, USER, max_tokens=3)
    await ask(client, USER, first.message.model_dump(), {"role": "user", "content": "more"})
    one, two = bench.engine.requests
    recorded = [*one.ids, *toy_ids("abc")]
    assert list(two.ids[: len(recorded)]) == recorded
    assert await outcomes(bench) == ["root", "extend"]


async def test_23_a_tool_without_arguments_is_called_with_an_empty_object(start_bench, add_tool):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    bench = await start_bench(*[Play(toy_ids(call("{}", "now")))] * 2)
    client = await bench.client()
    whole = await ask(client, USER, tools=[tool])
    assert whole.message.tool_calls[0].function.arguments == "{}"
    stream = await client.chat.completions.create(model="any", messages=[USER], tools=[tool], stream=True)
    deltas = [c.choices[0].delta.tool_calls for c in await bench.read(stream)]
    (only,) = [delta for delta in deltas if delta]
    assert only[0].function.arguments == "{}"


async def test_25_49_parallel_calls_keep_their_indexes_and_arguments(start_bench, add_tool):
    text = call('{"a": 1, "b": 2}') + "\n" + call('{"a": 3, "b": 4}')
    bench = await start_bench(*[Play(toy_ids(text))] * 2)
    client = await bench.client()
    whole = await ask(client, USER, tools=[add_tool])
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert [c.function.arguments for c in whole.message.tool_calls] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
    assert len({c.id for c in whole.message.tool_calls}) == 2
    stream = await client.chat.completions.create(model="any", messages=[USER], tools=[add_tool], stream=True)
    chunks = await bench.read(stream)
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.arguments) for c in calls] == [(0, '{"a": 1, "b": 2}'), (1, '{"a": 3, "b": 4}')]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "add", "arguments": {"a": 7', call('{"a": 7}', "unknown"), call("{a: 7}")]
)
async def test_49_a_malformed_or_unknown_call_stays_the_model_s_text(start_bench, add_tool, text):
    bench = await start_bench(Play(toy_ids(text)))
    choice = await ask(await bench.client(), USER, tools=[add_tool])
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


async def test_a_call_cut_by_the_token_limit_ends_with_length(start_bench, add_tool):
    bench = await start_bench(Play(toy_ids(call('{"a": 7, "b": 41}'))))
    choice = await ask(await bench.client(), USER, tools=[add_tool], max_tokens=20)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("content", [None, "", "left out"])
async def test_27_null_empty_and_missing_content_are_the_same_answer(start_bench, add_tool, content):
    bench = await start_bench(Play(toy_ids(call('{"a": 7, "b": 41}'))), Play(toy_ids("48")))
    client = await bench.client()
    first = await ask(client, USER, tools=[add_tool])
    echoed = {"role": "assistant", "tool_calls": [c.model_dump() for c in first.message.tool_calls]}
    if content != "left out":
        echoed["content"] = content
    await ask(client, USER, echoed, {"role": "tool", "tool_call_id": "x", "content": "48"}, tools=[add_tool])
    assert await outcomes(bench) == ["root", "extend"]
    assert toy_ids("None", end=False) not in [tuple(bench.engine.requests[1].ids[i : i + 4]) for i in range(400)]


async def test_27_a_client_that_adds_keys_reorders_arguments_and_renames_calls_still_extends(start_bench, add_tool):
    bench = await start_bench(Play(toy_ids(call('{"a": 7, "b": 41}'))), Play(toy_ids("48")))
    client = await bench.client()
    await ask(client, USER, tools=[add_tool])
    echoed = {
        "role": "assistant",
        "content": None,
        "function_call": None,
        "annotations": [],
        "provider_specific_fields": {"x": 1},
        "tool_calls": [{"id": "new", "type": "function", "function": {"name": "add", "arguments": '{"b":41,"a":7}'}}],
    }
    result = {"role": "tool", "tool_call_id": "new", "content": "48"}
    await client.chat.completions.create(
        model="any", messages=[USER], extra_body={"messages": [USER, echoed, result]}, tools=[add_tool]
    )
    assert await outcomes(bench) == ["root", "extend"]


async def test_77_tool_content_as_parts_or_as_text_gives_the_same_ids(start_bench, add_tool):
    prompts = []
    bench = await start_bench(*[Play(toy_ids("ok"))] * 2)
    client = await bench.client()
    for content in ("10525", [{"type": "text", "text": "10525"}]):
        await ask(client, USER, {"role": "tool", "tool_call_id": "x", "content": content})
        prompts.append(bench.engine.requests[-1].ids)
    assert prompts[0] == prompts[1]
    session = await bench.recorded()
    assert session.turns[0].prompt_end == session.turns[1].prompt_end


async def test_31_an_answer_that_the_agent_rewrote_forks_and_says_why(start_bench):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    client = await bench.client()
    await ask(client, USER)
    await ask(client, USER, {"role": "assistant", "content": "onX"}, {"role": "user", "content": "more"})
    turn = (await bench.turns())[1]
    assert (turn["outcome"], turn["reason"].split(":")[0]) == ("fork", "answer_differs")
    assert (await bench.inspect())["forks"] == 1


async def test_an_answer_trimmed_by_a_stop_string_is_not_extended_because_its_ids_hold_more(start_bench):
    bench = await start_bench(Play(toy_ids("one.two")), Play(toy_ids("ok")))
    client = await bench.client()
    first = await ask(client, USER, stop=["."])
    await ask(client, USER, first.message.model_dump(), {"role": "user", "content": "more"})
    assert (await bench.turns())[1]["reason"].startswith("answer_trimmed")


async def test_70_two_leaves_share_their_first_turn_and_count_it_once(start_bench):
    bench = await start_bench(*[Play(toy_ids(text)) for text in ("one", "two", "three")])
    client = await bench.client()
    first = (await ask(client, USER)).message.model_dump()
    await ask(client, USER, first, {"role": "user", "content": "x"})
    await ask(client, USER, first, {"role": "user", "content": "y"})
    tree = (await bench.recorded()).tree
    assert tree.tokens("completion") == len(toy_ids("one")) + len(toy_ids("two")) + len(toy_ids("three"))
    assert await outcomes(bench) == ["root", "extend", "extend"]


async def test_87_two_conversations_interleaved_in_one_session_are_two_paths(start_bench):
    bench = await start_bench(*[Play(toy_ids(text)) for text in ("a1", "b1", "a2", "b2")])
    client = await bench.client()
    more = {"role": "user", "content": "more"}
    other = {"role": "user", "content": "other"}
    a = (await ask(client, USER)).message.model_dump()
    b = (await ask(client, other)).message.model_dump()
    await ask(client, USER, a, more)
    await ask(client, other, b, more)
    assert await outcomes(bench) == ["root", "root", "extend", "extend"]
    session = await bench.recorded()
    ends = [session.turns[2].choices[0].end, session.turns[3].choices[0].end]
    assert [
        np.array_equal(session.tree.path_ids(end)[:-3], bench.engine.requests[i].ids)
        for end, i in zip(ends, (2, 3), strict=True)
    ] == [True, True]
