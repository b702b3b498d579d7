"""Rows about conversations: calls and their results, what extends, what forks, and what the tree holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from interruptions import Call
from spoken import CALLING, MESSAGES, events

from proxy.testing import toy_ids
from workers.engines.script import Play

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that opens the block of reasoning in the prompt."""
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def call(arguments, name="add"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def ask(client, *messages, **more):
    answer = await client.chat.completions.create(model="any", messages=list(messages), **more)
    return answer.choices[0]


async def outcomes(bench):
    return [turn["outcome"] for turn in await bench.turns()]


@each_way
@pytest.mark.parametrize("spoken", CALLING, ids=str)
@pytest.mark.parametrize(
    "arguments", ['{"a": "mkdir -p test/{test1,test2}"}', '{"a":1 , "b":  "}{]["}', '{"a": "\\u00e9\\"\\n"}', "{}"]
)
async def test_case_22_arguments_are_the_exact_text_of_the_model(start_bench, spoken, arguments, stream):
    """One character at a time; only a whole Anthropic answer carries them as an object."""
    bench = await start_bench(Play(toy_ids(call(arguments))))
    await bench.client()
    request = Call(bench, spoken, spoken.body(stream=stream, tools=list(spoken.tools)))
    await request.task
    ((name, written),) = spoken.calls(request.data)
    exact = stream or spoken is not MESSAGES
    assert (name, written if exact else json.loads(written)) == ("add", arguments if exact else json.loads(arguments))


@each_way
@pytest.mark.parametrize("spoken", CALLING, ids=str)
async def test_case_25_parallel_calls_stay_apart_in_every_dialect(start_bench, spoken, stream):
    bench = await start_bench(Play(toy_ids(call('{"a": 1}') + call('{"a": 2}')), chunk=1000))
    await bench.client()
    request = Call(bench, spoken, spoken.body(stream=stream, tools=list(spoken.tools)))
    await request.task
    assert [json.loads(arguments) for _, arguments in spoken.calls(request.data)] == [{"a": 1}, {"a": 2}]


async def test_case_17_18_an_anthropic_call_alone_is_block_0_and_its_arguments_come_in_a_delta(start_bench):
    bench = await start_bench(Play(toy_ids(call('{"a": 1}')), chunk=1000))
    await bench.client()
    request = Call(bench, MESSAGES, MESSAGES.body(stream=True, tools=list(MESSAGES.tools)))
    await request.task
    blocks = [event for event in events(request.data) if event["type"].startswith("content_block")]
    assert [event["type"].removeprefix("content_block_") for event in blocks] == ["start", "delta", "stop"]
    assert [event["index"] for event in blocks] == [0, 0, 0]
    start, delta, _ = blocks
    assert (start["content_block"]["type"], start["content_block"]["input"]) == ("tool_use", {})
    assert delta["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}


async def test_case_18_anthropic_text_before_a_call_is_a_block_of_its_own_and_no_delta_is_empty(start_bench):
    bench = await start_bench(Play(toy_ids(f"So: {call('{}')}\n{call('{}')}")))
    await bench.client()
    request = Call(bench, MESSAGES, MESSAGES.body(stream=True, tools=list(MESSAGES.tools)))
    await request.task
    starts = [e for e in events(request.data) if e["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [(0, "text"), (1, "tool_use"), (2, "tool_use")]
    deltas = [e["delta"] for e in events(request.data) if e["type"] == "content_block_delta"]
    assert all(delta.get("text") or delta.get("partial_json") for delta in deltas)


async def test_case_23_a_tool_without_arguments_is_called_with_an_empty_object(start_bench, add_tool):
    bench = await start_bench(*[Play(toy_ids(call("{}", "now")))] * 2)
    client = await bench.client()
    whole = await ask(client, USER, tools=[NOW])
    assert whole.message.tool_calls[0].function.arguments == "{}"
    stream = await client.chat.completions.create(model="any", messages=[USER], tools=[NOW], stream=True)
    deltas = [c.choices[0].delta.tool_calls for c in await bench.read(stream)]
    (only,) = [delta for delta in deltas if delta]
    assert only[0].function.arguments == "{}"


async def test_case_25_49_parallel_calls_keep_their_indexes_and_arguments(start_bench, add_tool):
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
async def test_case_49_a_malformed_or_unknown_call_stays_the_model_s_text(start_bench, add_tool, text):
    bench = await start_bench(Play(toy_ids(text)))
    choice = await ask(await bench.client(), USER, tools=[add_tool])
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


@pytest.mark.parametrize("content", [None, "", "left out"])
async def test_case_27_null_empty_and_missing_content_are_the_same_answer(start_bench, add_tool, content):
    bench = await start_bench(Play(toy_ids(call('{"a": 7, "b": 41}'))), Play(toy_ids("48")))
    client = await bench.client()
    first = await ask(client, USER, tools=[add_tool])
    echoed = {"role": "assistant", "tool_calls": [c.model_dump() for c in first.message.tool_calls]}
    if content != "left out":
        echoed["content"] = content
    await ask(client, USER, echoed, {"role": "tool", "tool_call_id": "x", "content": "48"}, tools=[add_tool])
    assert await outcomes(bench) == ["root", "extend"]
    assert toy_ids("None", end=False) not in [tuple(bench.engine.requests[1].ids[i : i + 4]) for i in range(400)]


async def test_case_27_a_client_that_adds_keys_reorders_arguments_and_renames_calls_still_extends(
    start_bench, add_tool
):
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


async def test_case_77_tool_content_as_parts_or_as_text_gives_the_same_ids(start_bench, add_tool):
    prompts = []
    bench = await start_bench(*[Play(toy_ids("ok"))] * 2)
    client = await bench.client()
    for content in ("10525", [{"type": "text", "text": "10525"}]):
        await ask(client, USER, {"role": "tool", "tool_call_id": "x", "content": content})
        prompts.append(bench.engine.requests[-1].ids)
    assert prompts[0] == prompts[1]
    session = await bench.recorded()
    assert session.turns[0].prompt_end == session.turns[1].prompt_end


async def test_case_31_an_answer_that_the_agent_rewrote_forks_and_says_why(start_bench):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    client = await bench.client()
    await ask(client, USER)
    await ask(client, USER, {"role": "assistant", "content": "onX"}, {"role": "user", "content": "more"})
    turn = (await bench.turns())[1]
    assert (turn["outcome"], turn["reason"].split(":")[0]) == ("fork", "answer_differs")
    assert (await bench.inspect())["forks"] == 1


async def test_case_70_two_leaves_share_their_first_turn_and_count_it_once(start_bench):
    bench = await start_bench(*[Play(toy_ids(text)) for text in ("one", "two", "three")])
    client = await bench.client()
    first = (await ask(client, USER)).message.model_dump()
    await ask(client, USER, first, {"role": "user", "content": "x"})
    await ask(client, USER, first, {"role": "user", "content": "y"})
    tree = (await bench.recorded()).tree
    assert tree.tokens("completion") == len(toy_ids("one")) + len(toy_ids("two")) + len(toy_ids("three"))
    assert await outcomes(bench) == ["root", "extend", "extend"]


async def test_case_87_two_conversations_interleaved_in_one_session_are_two_paths(start_bench):
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


@each_way
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}], ids=str)
@pytest.mark.parametrize("calls", [True, False])
async def test_case_49_the_finish_reason_is_the_same_in_both_modes(start_bench, add_tool, choice, calls, stream):
    """A named call is no decision of the model: `stop`, as at the vendor. Never `tool_calls` without one."""
    begun = {"auto": "", "required": '<tool_call>\n{"name": "'}.get(
        str(choice), '<tool_call>\n{"name": "add", "arguments": '
    )
    written = call('{"a": 7}').removeprefix(begun) if calls else "no call"
    bench = await start_bench(Play(toy_ids(written)))
    client = await bench.client()
    options = {"model": "any", "messages": [USER], "tools": [add_tool], "tool_choice": choice, "stream": stream}
    answer = await client.chat.completions.create(**options)
    choices = [chunk.choices[0] for chunk in await bench.read(answer)] if stream else answer.choices
    made = [c for part in choices for c in (part.delta if stream else part.message).tool_calls or ()]
    assert len(made) == calls
    assert choices[-1].finish_reason == ("tool_calls" if calls and isinstance(choice, str) else "stop")


@pytest.mark.parametrize("kept", [True, False])
async def test_case_32_reasoning_whose_opening_was_in_the_prompt_is_never_wrapped_again(start_bench, kept):
    written = "Hm.\n</think>\n\nHello"
    bench = await start_bench(Play(toy_ids(written)), Play((2,)), template=OPENS, model={"reasoning_parser": "think"})
    client = await bench.client()
    answer = (await ask(client, USER)).message
    assert (answer.reasoning_content, answer.content) == ("Hm.", "Hello")
    said = answer.model_dump(exclude_none=True)
    if not kept:
        del said["reasoning_content"]
    await ask(client, USER, said, MORE)
    first, second = bench.engine.requests
    recorded = (*first.ids, *toy_ids(written))
    assert second.ids[: len(recorded)] == recorded
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", None])
async def test_case_80_reasoning_sent_back_under_either_name_or_not_reaches_the_same_node(start_bench, name):
    bench = await start_bench(Play(toy_ids("<think>Hm.</think>Hello")), Play((2,)), model={"reasoning_parser": "think"})
    client = await bench.client()
    assert (await ask(client, USER)).message.reasoning_content == "Hm."
    said = {"role": "assistant", "content": "Hello", **({name: "Hm."} if name else {})}
    await ask(client, USER, said, MORE)
    session = await bench.recorded()
    assert session.turns[1].parent == (0, 0)
    assert await outcomes(bench) == ["root", "extend"]


async def test_case_37_a_template_that_cannot_be_continued_renders_in_full_and_says_so(start_bench):
    """Our engines take any ids, so only the template can refuse a continuation; then each turn forks, and works."""
    counting = (
        "{{ messages | length }}|{% for m in messages %}{{ m.content }}<|im_end|>{{ messages | length }}{% endfor %}"
    )
    bench = await start_bench(Play(toy_ids("Hello")), Play(toy_ids("ok")), template=counting)
    client = await bench.client()
    first = (await ask(client, USER)).message.model_dump(exclude_none=True)
    assert (await ask(client, USER, first, MORE)).message.content == "ok"
    turn = (await bench.turns())[1]
    assert (turn["outcome"], turn["reason"].split(":")[0]) == ("fork", "template")


async def test_case_62_a_second_turn_keeps_its_calls_its_format_and_its_limit(start_bench, add_tool):
    bench = await start_bench(
        Play(toy_ids(call('{"a": 1}'))), Play(toy_ids(call('{"a": 2}'))), engine={"kind": "scripted"}
    )
    client = await bench.client()
    options = {"tools": [add_tool], "response_format": {"type": "json_object"}, "max_completion_tokens": 99}
    first = (await ask(client, USER, **options)).message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "1"}
    second = await ask(client, USER, first.model_dump(exclude_none=True), result, **options)
    assert [c.function.arguments for c in second.message.tool_calls] == ['{"a": 2}']
    assert [(r.max_new_tokens, json.loads(r.json_schema)) for r in bench.engine.requests] == [
        (99, {"type": "object"})
    ] * 2
    assert await outcomes(bench) == ["root", "extend"]


@pytest.mark.parametrize("train_unused", [False, True])
@pytest.mark.parametrize(("continued", "used"), [(0, {0, 2}), (1, {1, 2}), (None, {1})])
async def test_case_14_of_two_answers_to_the_same_request_the_one_that_was_used_counts(
    start_bench, continued, used, train_unused
):
    """A client that gave up and asked anew without saying so. If none was used, the newest counts."""
    texts = ["one", "two", "end"]
    bench = await start_bench(*[Play(toy_ids(text)) for text in texts], agent={"train_unused": train_unused})
    client = await bench.client()
    answers = [(await ask(client, USER)).message.content for _ in range(2)]
    if continued is not None:
        await ask(client, USER, {"role": "assistant", "content": answers[continued]}, MORE)
    session = await bench.recorded()
    trained = {turn.index for turn in session.turns if turn.generation in session.trainable()}
    assert trained == (set(range(len(session.turns))) if train_unused else used)


async def test_case_14_a_newest_answer_that_never_ended_is_not_the_one_that_counts(start_bench, until):
    bench = await start_bench(Play(toy_ids("one")), route=True)
    client = await bench.client()
    await ask(client, USER)
    await bench.route("closed")
    request = Call(bench, CALLING[0], CALLING[0].body())
    session = await bench.recorded()
    await until(lambda: len(session.turns) == 2, "the same is asked again")
    request.hang_up()
    await request.task
    assert session.trainable() == {session.turns[0].generation}
