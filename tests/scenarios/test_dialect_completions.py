"""Legacy completions with the stock OpenAI client against a real proxy. Numbers are rows of the case list."""

from __future__ import annotations

import openai
import pytest

from proxy.testing import toy_ids
from workers.engines.script import Play


async def complete(bench, prompt="Once", **more):
    """One completion in the bench's session."""
    client = bench.client_of(bench.session) if bench.session else await bench.client()
    return await client.completions.create(model="any", prompt=prompt, **more)


async def test_the_prompt_is_taken_as_it_is_and_the_answer_shown_as_it_is_generated(start_bench):
    text = '<think>a</think><tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    bench = await start_bench(Play(toy_ids(text)), model={"reasoning_parser": "think"})
    answer = await complete(bench, max_tokens=200)
    assert tuple(bench.engine.requests[0].ids) == toy_ids("Once", end=False)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, len(toy_ids(text)))


async def test_without_a_limit_sixteen_tokens_are_generated_as_at_the_vendor(start_bench):
    bench = await start_bench(Play(toy_ids("abcdefghijklmnopqrstuvwxyz")))
    answer = await complete(bench)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcdefghijklmnop", "length")


@pytest.mark.parametrize("nested", [False, True])
async def test_a_prompt_of_ids_reaches_the_engine_as_these_ids(start_bench, nested):
    ids = [1, *toy_ids("raw", end=False)]
    bench = await start_bench(Play(toy_ids("ok")))
    await complete(bench, [ids] if nested else ids)
    assert list(bench.engine.requests[0].ids) == ids


async def test_a_prompt_that_goes_on_from_an_answer_extends_it(start_bench):
    bench = await start_bench(Play(toy_ids(" upon")), Play(toy_ids(" time")))
    await complete(bench)
    await complete(bench, [*bench.engine.requests[0].ids, *toy_ids(" upon"), *toy_ids(" a", end=False)])
    assert [turn["outcome"] for turn in await bench.turns()] == ["root", "extend"]


async def test_case_21_a_stream_says_the_same_and_usage_comes_last_and_only_when_asked(start_bench):
    bench = await start_bench(*[Play(toy_ids(" upon"))] * 2)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = await bench.read(await complete(bench, stream=True, **options))
        if options:
            usage = chunks.pop()
            assert (usage.choices, usage.usage.total_tokens) == ([], 10)
        assert "".join(chunk.choices[0].text for chunk in chunks) == " upon"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert not any(chunk.usage for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_case_57_log_probabilities_are_the_engine_s_in_the_schema_of_completions(start_bench, stream):
    bench = await start_bench(Play(toy_ids("abc")))
    answer = await complete(bench, logprobs=0, stream=stream)
    choices = [chunk.choices[0] for chunk in await bench.read(answer)] if stream else answer.choices
    told = [choice.logprobs for choice in choices if choice.logprobs]
    assert [text for part in told for text in part.tokens] == ["a", "b", "c"]
    assert [value for part in told for value in part.token_logprobs] == [-0.25, -0.5, -0.75]
    assert [offset for part in told for offset in part.text_offset] == [0, 1, 2]


async def test_case_57_the_likeliest_tokens_are_told_by_their_text(start_bench):
    bench = await start_bench(Play(toy_ids("abc")), engine={"kind": "scripted"})
    answer = await complete(bench, logprobs=2)
    assert answer.choices[0].logprobs.top_logprobs[0] == {"a": -0.25, "b": -1.25}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_generations_of_their_own(start_bench, stream):
    bench = await start_bench(Play(toy_ids("a")), Play(toy_ids("b")))
    answer = await complete(bench, n=2, stream=stream)
    texts = ["", ""]
    for chunk in await bench.read(answer) if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert sorted(texts) == ["a", "b"]
    assert len(bench.engine.requests) == 2


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("prompt", ["a", "b"])])
async def test_what_is_not_supported_is_refused_by_name(start_bench, name, value):
    bench = await start_bench()
    with pytest.raises(openai.BadRequestError) as failure:
        await complete(bench, **{name: value})
    assert (failure.value.param, failure.value.code) == (name, "unsupported_parameter")
    assert await bench.turns() == []
