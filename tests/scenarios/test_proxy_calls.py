"""Calls that a request forces or limits, and reasoning beside the answer."""

from __future__ import annotations

import pytest

from proxy.testing import toy_ids
from workers.engines.script import Play

USER = {"role": "user", "content": "hi"}
NAMED = {"type": "function", "function": {"name": "add"}}
REST = '{"a": 7, "b": 41}}\n</tool_call>'
FORCED = {
    "required": ("required", '<tool_call>\n{"name": "', f'add", "arguments": {REST}'),
    "named": (NAMED, '<tool_call>\n{"name": "add", "arguments": ', REST),
}
THINK = {"model": {"reasoning_parser": "think"}}
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that opens the block of reasoning in the prompt."""
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def call(arguments):
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


async def ask(bench, client, *messages, stream, **more):
    """(text, reasoning, calls, finish reason)."""
    body = {"model": "any", "messages": list(messages) or [USER], **more}
    if not stream:
        choice = (await client.chat.completions.create(**body)).choices[0]
        message = choice.message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        return message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason
    chunks = [c.choices[0] for c in await bench.read(await client.chat.completions.create(**body, stream=True))]
    calls = [(c.function.name, c.function.arguments) for chunk in chunks for c in chunk.delta.tool_calls or ()]
    return (
        "".join(chunk.delta.content or "" for chunk in chunks),
        "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks),
        calls,
        chunks[-1].finish_reason,
    )


def asked(bench, index=-1):
    """The text of a prompt without the toy model's marks."""
    return bytes(token - 3 for token in bench.engine.requests[index].ids if token > 2).decode()


@each_way
@pytest.mark.parametrize("kind", FORCED)
async def test_a_forced_call_is_begun_in_the_prompt_and_the_next_turn_extends_it(start_bench, add_tool, kind, stream):
    choice, prefix, written = FORCED[kind]
    bench = await start_bench(Play(toy_ids(written)), Play(toy_ids("48")))
    client = await bench.client()
    options = {"tools": [add_tool], "stream": stream}
    answer = await ask(bench, client, tool_choice=choice, **options)
    arguments = '{"a": 7, "b": 41}'
    assert answer == ("", "", [("add", arguments)], "stop" if kind == "named" else "tool_calls")
    assert asked(bench).endswith(f"assistant\n{prefix}")
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == toy_ids(written)
    function = {"name": "add", "arguments": arguments}
    said = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "x", "content": "48"}
    await ask(bench, client, USER, said, result, **options)
    first, second = bench.engine.requests
    recorded = (*first.ids, *toy_ids(written))
    assert second.ids[: len(recorded)] == recorded
    assert [turn["outcome"] for turn in await bench.turns()] == ["root", "extend"]


@each_way
async def test_a_forced_call_begins_behind_the_reasoning_that_the_prompt_opened(start_bench, add_tool, stream):
    bench = await start_bench(Play(toy_ids(REST)), template=OPENS, **THINK)
    client = await bench.client()
    answer = await ask(bench, client, tools=[add_tool], tool_choice=NAMED, stream=stream)
    assert answer[2] == [("add", '{"a": 7, "b": 41}')]
    assert asked(bench).endswith('<think>\n</think>\n\n<tool_call>\n{"name": "add", "arguments": ')


@each_way
async def test_a_forced_call_that_the_limit_cut_is_no_call(start_bench, add_tool, stream):
    bench = await start_bench(Play(toy_ids(REST)))
    client = await bench.client()
    answer = await ask(bench, client, tools=[add_tool], tool_choice=NAMED, max_tokens=4, stream=stream)
    assert (answer[2], answer[3]) == ([], "length")


@each_way
async def test_tool_choice_none_leaves_a_call_as_text(start_bench, add_tool, stream):
    text = call('{"a": 7}')
    bench = await start_bench(Play(toy_ids(text)))
    client = await bench.client()
    answer = await ask(bench, client, tools=[add_tool], tool_choice="none", stream=stream)
    assert (answer[0], answer[2], answer[3]) == (text, [], "stop")


@each_way
@pytest.mark.parametrize("chunk", [1, 1000])
async def test_without_parallel_calls_the_answer_ends_with_its_first(start_bench, add_tool, until, chunk, stream):
    first, second = call('{"a": 1}'), call('{"a": 2}')
    bench = await start_bench(Play(toy_ids(f"{first}\n{second}"), chunk=chunk), Play(toy_ids("ok")))
    client = await bench.client()
    options = {"tools": [add_tool], "parallel_tool_calls": False, "stream": stream}
    answer = await ask(bench, client, **options)
    assert (answer[2], answer[3]) == ([("add", '{"a": 1}')], "tool_calls")
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == toy_ids(first, end=False)
    await until(lambda: not bench.engine._live, "the engine was told to stop")
    function = {"name": "add", "arguments": '{"a": 1}'}
    said = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    await ask(bench, client, USER, said, {"role": "tool", "tool_call_id": "x", "content": "1"}, **options)
    recorded = (*bench.engine.requests[0].ids, *toy_ids(first))
    assert bench.engine.requests[1].ids[: len(recorded)] == recorded


@each_way
async def test_a_limited_number_of_calls_changes_nothing_for_an_answer_without_any(start_bench, add_tool, stream):
    bench = await start_bench(Play(toy_ids("no call")))
    client = await bench.client()
    answer = await ask(bench, client, tools=[add_tool], parallel_tool_calls=False, stream=stream)
    assert (answer[0], answer[2], answer[3]) == ("no call", [], "stop")


@each_way
@pytest.mark.parametrize(
    ("template", "written"), [(None, "<think>\nHm.\n</think>\n\nHello"), (OPENS, "Hm.\n</think>\n\nHello")]
)
async def test_reasoning_is_shown_beside_the_answer(start_bench, template, written, stream):
    bench = await start_bench(Play(toy_ids(written)), template=template, **THINK)
    client = await bench.client()
    answer = await ask(bench, client, stream=stream)
    assert answer == ("Hello", "Hm.", [], "stop")
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == toy_ids(written)
