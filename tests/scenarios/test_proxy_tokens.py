"""What is recorded is what the engine wrote, whatever the agent is shown. Numbers are rows of the case list."""

from __future__ import annotations

import asyncio

import openai
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play
from workers.engines.scripted import ScriptedEngine


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 41}}\n</tool_call>'


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_01_tokens_of_a_tool_call_that_the_parser_hides_are_all_recorded(start_bench, add_tool, chunk):
    bench = await start_bench(Play(toy_ids(CALL), chunk=chunk))
    chunks = await bench.read(await bench.ask(stream=True, tools=[add_tool], stream_options={"include_usage": True}))
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == toy_ids(CALL)
    assert chunks[-1].usage.completion_tokens == len(toy_ids(CALL))
    assert "tool_call" not in text_of(chunks)


@pytest.mark.parametrize("kind", ["abort", "abort_bare", "duplicate_last"])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_04_06_an_aborted_segment_neither_loses_nor_repeats_a_token(start_bench, kind, after):
    whole = toy_ids("Hello")
    bench = await start_bench(Play(whole, fault=Fault(kind, after)), Play(whole[after:]))
    answer = await bench.ask()
    session = await bench.recorded()
    assert tuple(session.turns[0].choices[0].recording.ids) == whole
    assert answer.choices[0].message.content == "Hello"
    assert list(bench.engine.requests[1].ids) == list(bench.engine.requests[0].ids) + list(whole[:after])


@pytest.mark.parametrize("kind", ["extra_logprobs", "sentinel", "nan"])
async def test_08_39_a_chunk_with_broken_logprobs_is_never_recorded_and_the_agent_does_not_notice(start_bench, kind):
    whole = toy_ids("Hello")
    bench = await start_bench(Play(whole, fault=Fault(kind, 2)), Play(whole[2:]))
    answer = await bench.ask()
    recording = (await bench.recorded()).turns[0].choices[0].recording
    assert answer.choices[0].message.content == "Hello"
    assert tuple(recording.ids) == whole
    assert len(recording.logprobs) == len(whole)
    assert all(-100 < value <= 0 for value in recording.logprobs)


async def test_08_an_engine_that_only_sends_broken_chunks_fails_the_turn_as_infrastructure(start_bench):
    bench = await start_bench(*[Play(toy_ids("Hello"), fault=Fault("extra_logprobs", 0)) for _ in range(5)])
    with pytest.raises(openai.InternalServerError) as failure:
        await bench.ask()
    assert failure.value.response.headers["x-should-retry"] == "false"
    assert (await bench.turns())[0]["status"] == "failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_26_a_character_split_over_tokens_reaches_the_agent_whole(start_bench, stream):
    bench = await start_bench(Play(toy_ids("a\N{GRINNING FACE}b")))
    answer = await bench.ask(stream=stream)
    if stream:
        deltas = [c.choices[0].delta.content for c in await bench.read(answer)]
        assert "".join(delta or "" for delta in deltas) == "a\N{GRINNING FACE}b"
        assert not any("\N{REPLACEMENT CHARACTER}" in (delta or "") for delta in deltas)
    else:
        assert answer.choices[0].message.content == "a\N{GRINNING FACE}b"


async def test_26_65_a_cut_within_a_character_does_not_harm_it(start_bench):
    whole = toy_ids("\N{GRINNING FACE}")
    bench = await start_bench(Play(whole, fault=Fault("abort", 1)), Play(whole[1:]))
    assert (await bench.ask()).choices[0].message.content == "\N{GRINNING FACE}"


async def test_26_an_answer_that_ends_within_a_character_shows_one_replacement_and_keeps_its_ids(start_bench):
    bench = await start_bench(Play(toy_ids("ok\N{GRINNING FACE}")))
    answer = await bench.ask(max_tokens=5)
    assert answer.choices[0].message.content == "ok\N{REPLACEMENT CHARACTER}"
    assert answer.choices[0].finish_reason == "length"
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == toy_ids("ok\N{GRINNING FACE}")[:5]


async def test_30_a_prompt_that_does_not_fit_is_told_in_openai_s_words_and_is_no_turn(start_bench):
    bench = await start_bench(model={"max_context": 50})
    with pytest.raises(openai.BadRequestError) as failure:
        await bench.ask(messages=[{"role": "user", "content": "x" * 50}])
    assert failure.value.code == "context_length_exceeded"
    assert failure.value.param == "messages"
    assert failure.value.type == "invalid_request_error"
    assert await bench.turns() == []


async def test_30_an_engine_that_finds_the_prompt_too_long_is_translated(start_bench):
    bench = await start_bench(route=False)
    async with ScriptedEngine(vocab_size=259, max_context=8) as small:
        await bench.proxy.open_route(small.url)
        with pytest.raises(openai.BadRequestError) as failure:
            await bench.ask()
    assert failure.value.code == "context_length_exceeded"


async def test_43_versions_are_per_token_when_weights_change_under_a_generation(start_bench, until):
    bench = await start_bench(Play(toy_ids("abcdef"), fault=Fault("stall", 3)))
    asking = asyncio.create_task(bench.ask())
    await until(lambda: any(len(o.ids) == 3 for o in bench.engine.outputs.values()), "three tokens")
    bench.engine.version = "1"
    await bench.engine.release()
    await asking
    assert (await bench.turns())[0]["versions"] == [[0, 3], [1, 4]]


async def test_43_a_span_list_that_contradicts_the_labels_makes_the_tokens_context_only(start_bench):
    bench = await start_bench(Play(toy_ids("abcdef"), versions=("3",) * 7))
    await bench.ask()
    assert (await bench.turns())[0]["versions"] == [[-1, 7]]


@pytest.mark.parametrize("stream", [False, True])
async def test_59_special_tokens_are_recorded_but_not_shown(start_bench, stream):
    ids = (*toy_ids("a", end=False), 0, 1, *toy_ids("b"))
    bench = await start_bench(Play(ids))
    answer = await bench.ask(stream=stream)
    text = text_of(await bench.read(answer)) if stream else answer.choices[0].message.content
    assert text == "ab"
    assert tuple((await bench.recorded()).turns[0].choices[0].recording.ids) == ids


async def test_68_an_empty_generation_is_no_parent_of_its_repetition(start_bench):
    bench = await start_bench(Play((), finish="stop"), Play(toy_ids("x")))
    client = await bench.client()
    request = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    first = await client.chat.completions.create(**request)
    assert first.choices[0].message.content == ""
    await client.chat.completions.create(**request)
    session = await bench.recorded()
    assert [turn.outcome.value for turn in session.turns] == ["root", "root"]
    assert session.turns[0].choices[0].end == session.turns[0].prompt_end == session.turns[1].prompt_end


async def test_71_72_what_the_agent_asked_and_what_was_used_are_both_recorded_and_logprobs_are_not_rescaled(
    start_bench,
):
    ids = toy_ids("ab")
    bench = await start_bench(Play(ids, logprobs=(-0.5, -1.25, -2.0)), sampling={"temperature": 0.6, "top_p": 1.0})
    answer = await bench.ask(temperature=0, top_p=0.9, seed=5, logprobs=True)
    turn = (await bench.turns())[0]
    assert turn["asked"] == {"model": "any", "temperature": 0.0, "top_p": 0.9, "seed": 5}
    assert (turn["used"]["temperature"], turn["used"]["top_p"]) == (0.6, 1.0)
    assert bench.engine.requests[0].temperature == 0.6
    assert (await bench.recorded()).turns[0].choices[0].recording.logprobs == [-0.5, -1.25, -2.0]
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [-0.5, -1.25]


async def test_56_logprobs_of_a_stream_are_those_of_the_whole_answer(start_bench):
    bench = await start_bench(Play(toy_ids("abc")), Play(toy_ids("abc")))
    whole = await bench.ask(logprobs=True)
    chunks = await bench.read(await bench.ask(logprobs=True, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in whole.choices[0].logprobs.content]
    silent = await bench.ask()
    assert silent.choices[0].logprobs is None


@pytest.mark.parametrize("stop", ["lo", "o W"])
@pytest.mark.parametrize("chunk", [1, 4])
async def test_a_stop_string_ends_the_answer_even_across_a_cut(start_bench, stop, chunk):
    whole = toy_ids("Hello World")
    bench = await start_bench(Play(whole, chunk=chunk, fault=Fault("abort", 4)), Play(whole[4:], chunk=chunk))
    answer = await bench.ask(stop=[stop])
    assert answer.choices[0].message.content == "Hello World".split(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    recorded = bytes(token - 3 for token in (await bench.recorded()).turns[0].choices[0].recording.ids).decode()
    assert recorded.endswith(stop)
    assert "Hello World".startswith(recorded)
