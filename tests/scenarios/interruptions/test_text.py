"""What the agent reads does not depend on where a generation was cut: characters, stop strings, calls, budgets."""

from __future__ import annotations

import asyncio

import pytest

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

TEXT = "a\N{GRINNING FACE}b, \N{LATIN SMALL LETTER O WITH DIAERESIS}. <stop> and more"
WHOLE = toy_ids(TEXT)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 41}}\n</tool_call>'
PROMPT = 21
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_cut = pytest.mark.parametrize("kind", ["abort", "drop"])


def cut_everywhere(last, whole=WHOLE, kind="abort"):
    """The n-th request is cut once, behind its n-th token, up to `last`; the rest by what the engine is asked with."""
    positions = iter(range(1, last + 1))

    def respond(request):
        done = len(request.ids) - PROMPT
        return Play(whole[done:], fault=None if done else Fault(kind, next(positions)))

    return respond


async def ask_often(bench, times, *, stream, **request):
    """The same request so many times: what was said, if that was always the same; and all recorded ids."""
    client, room = await bench.client(), asyncio.Semaphore(16)

    async def ask():
        async with room:
            return await said(bench, client, stream=stream, **request)

    answers = await asyncio.gather(*(ask() for _ in range(times)))
    assert answers == [answers[0]] * times
    recorded = {tuple(turn.choices[0].recording.ids) for turn in (await bench.recorded()).turns}
    return answers[0], recorded


async def said(bench, client, *, stream, **request):
    """(text, finish reason, calls)."""
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], **request}
    if not stream:
        choice = (await client.chat.completions.create(**body)).choices[0]
        calls = [call.function.arguments for call in choice.message.tool_calls or ()]
        return choice.message.content or "", choice.finish_reason, calls
    choices = [c.choices[0] for c in await bench.read(await client.chat.completions.create(**body, stream=True))]
    calls = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or ()]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason, calls


@each_way
@each_cut
async def test_characters_of_several_bytes_are_whole_wherever_the_cut_is(start_bench, kind, stream):
    times = len(WHOLE) - 1
    bench = await start_bench(scripted={"respond": cut_everywhere(times, kind=kind)}, agent={"max_turns": times})
    assert await ask_often(bench, times, stream=stream) == ((TEXT, "stop", []), {WHOLE})


@each_way
@each_cut
async def test_a_stop_string_is_found_wherever_the_cut_is(start_bench, kind, stream):
    shown = TEXT.split("<stop>")[0]
    times = len(f"{shown}<stop>".encode())
    bench = await start_bench(scripted={"respond": cut_everywhere(times, kind=kind)}, agent={"max_turns": times})
    answer = await ask_often(bench, times, stream=stream, stop=["never", "<stop>"])
    assert answer == ((shown, "stop", []), {WHOLE[:times]})


@each_way
async def test_a_call_is_read_whole_wherever_the_cut_is(start_bench, add_tool, stream):
    whole = toy_ids(f"So: {CALL}")
    times = len(whole) - 1
    bench = await start_bench(scripted={"respond": cut_everywhere(times, whole)}, agent={"max_turns": times})
    answer = await ask_often(bench, times, stream=stream, tools=[add_tool])
    assert answer == (("So:", "tool_calls", ['{"a": 7, "b": 41}']), {whole})


@each_way
async def test_the_budget_holds_over_all_segments(start_bench, stream):
    limit = 4  # within a character
    shown = "a\N{REPLACEMENT CHARACTER}"
    bench = await start_bench(scripted={"respond": cut_everywhere(limit)}, agent={"max_turns": limit})
    answer = await ask_often(bench, limit, stream=stream, max_tokens=limit)
    assert answer == ((shown, "length", []), {WHOLE[:limit]})
    # The one that was cut with its budget used up is not asked for more.
    assert sorted(request.max_new_tokens for request in bench.engine.requests) == [1, 2, 3, *[limit] * limit]


async def test_many_cuts_in_one_answer_leave_no_trace_in_it(start_bench):
    def respond(request):
        return Play(WHOLE[len(request.ids) - PROMPT :], fault=Fault("abort", 1))

    bench = await start_bench(scripted={"respond": respond})
    assert await said(bench, await bench.client(), stream=True) == (TEXT, "stop", [])
    assert len(bench.engine.requests) == len(WHOLE)
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == WHOLE


@pytest.mark.parametrize("chunk", [2, 100])
async def test_tokens_behind_the_end_that_the_proxy_found_are_not_recorded(start_bench, chunk):
    bench = await start_bench(Play(toy_ids("Hello<stop> and what an engine wrote ahead"), chunk=chunk))
    answer = await bench.ask(stop=["<stop>"])
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.completion_tokens == len("Hello<stop>")
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == toy_ids("Hello<stop>", end=False)
