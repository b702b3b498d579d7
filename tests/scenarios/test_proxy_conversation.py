"""Turns of one conversation: what extends, what forks, and what the tree holds. Numbers are rows of the case list."""

from __future__ import annotations

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


async def test_a_call_cut_by_the_token_limit_ends_with_length(start_bench, add_tool):
    bench = await start_bench(Play(toy_ids(call('{"a": 7, "b": 41}'))))
    choice = await ask(await bench.client(), USER, tools=[add_tool], max_tokens=20)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None


async def test_an_answer_trimmed_by_a_stop_string_is_not_extended_because_its_ids_hold_more(start_bench):
    bench = await start_bench(Play(toy_ids("one.two")), Play(toy_ids("ok")))
    client = await bench.client()
    first = await ask(client, USER, stop=["."])
    await ask(client, USER, first.message.model_dump(), {"role": "user", "content": "more"})
    assert (await bench.turns())[1]["reason"].startswith("answer_trimmed")
