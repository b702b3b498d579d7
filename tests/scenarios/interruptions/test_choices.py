"""Several choices of one request are generations of their own: cut where each stands, told apart, failing together."""

from __future__ import annotations

import asyncio

import openai
import pytest
from interruptions import assert_as_logged, busy

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

TEXTS = ["Hello, world", "Good morning", "How are you?"]
CUTS = [5, 0, 9]
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def plays(texts, cuts):
    return [Play(toy_ids(text), fault=Fault("stall", cut)) for text, cut in zip(texts, cuts, strict=True)]


def rests(texts, cuts):
    """Continues each text by the length of what it is asked with."""
    following = {cut: toy_ids(text)[cut:] for text, cut in zip(texts, cuts, strict=True)}
    return lambda request: Play(following[len(request.ids) - 21])


async def texts_of(bench, answer, *, stream):
    """(texts, finish reasons, generated tokens) of all choices."""
    if not stream:
        return (
            [choice.message.content for choice in answer.choices],
            [choice.finish_reason for choice in answer.choices],
            answer.usage.completion_tokens,
        )
    chunks = await bench.read(answer)
    texts, reasons = [""] * len(TEXTS), [None] * len(TEXTS)
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        assert reasons[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks[-1].usage.completion_tokens


@each_way
async def test_siblings_cut_at_different_tokens_each_go_on_from_their_own(start_bench, until, stream):
    bench = await start_bench(*plays(TEXTS, CUTS), scripted={"respond": rests(TEXTS, CUTS)})
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asking = asyncio.create_task(bench.ask(n=3, **options))
    await until(lambda: [len(o.ids) for o in bench.engine.outputs.values()] == CUTS, "each stands at its cut")
    await bench.update_weights(1)
    texts, reasons, tokens = await texts_of(bench, await asking, stream=stream)
    assert (texts, reasons, tokens) == (TEXTS, ["stop"] * 3, sum(len(toy_ids(text)) for text in TEXTS))
    session = await bench.recorded()
    (turn,) = session.turns
    for choice, text, cut in zip(turn.choices, TEXTS, CUTS, strict=True):
        assert tuple(choice.recording.ids) == toy_ids(text)
        assert choice.recording.versions == [0] * cut + [1] * (len(toy_ids(text)) - cut)
        assert_as_logged(choice, bench.engine)
    assert session.tree.tokens("prompt") == turn.prompt_tokens
    assert session.trainable() == {choice.generation for choice in turn.choices}


@each_way
async def test_usage_counts_the_prompt_once_and_all_answers(start_bench, stream):
    bench = await start_bench(*[Play(toy_ids(text)) for text in TEXTS])
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await bench.ask(n=3, **options)
    usage = (await bench.read(answer))[-1].usage if stream else answer.usage
    completion = sum(len(toy_ids(text)) for text in TEXTS)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, completion, 21 + completion)


@each_way
async def test_when_one_sibling_fails_the_answer_fails_and_the_others_leave_their_engine(start_bench, until, stream):
    """Its engine only ever answers it with log-probs that do not fit its tokens."""
    broken = Play(toy_ids("x"), fault=Fault("extra_logprobs", 0))
    healthy = [Play(toy_ids(text), fault=Fault("stall", 3)) for text in TEXTS[:2]]
    bench = await start_bench(healthy[0], broken, healthy[1], scripted={"respond": lambda request: broken})
    with pytest.raises(openai.APIError, match="log-probs"):
        await texts_of(bench, await bench.ask(n=3, stream=stream), stream=stream)
    await until(lambda: not busy(bench.proxy) and not bench.engine._live, "nothing runs any more")
    turn = (await bench.turns())[0]
    assert [choice["status"] for choice in turn["choices"]] == ["aborted", "failed", "aborted"]
    first, _, third = list(bench.engine.outputs.values())[:3]
    assert (first.aborted, third.aborted) == (True, True)
    session = await bench.recorded()
    assert not session.trainable()


async def test_a_later_turn_goes_on_from_the_choice_that_the_agent_took(start_bench):
    bench = await start_bench(*[Play(toy_ids(text)) for text in TEXTS], Play(toy_ids("ok")))
    client = await bench.client()
    user = {"role": "user", "content": "hi"}
    first = await client.chat.completions.create(model="any", messages=[user], n=3)
    taken = {"role": "assistant", "content": first.choices[2].message.content}
    await client.chat.completions.create(model="any", messages=[user, taken, {"role": "user", "content": "more"}])
    session = await bench.recorded()
    assert session.turns[1].parent == (0, 2)
    recorded = (*bench.engine.requests[2].ids, *toy_ids(TEXTS[2]))
    assert bench.engine.requests[3].ids[: len(recorded)] == recorded
    assert len(session.trainable()) == 4


async def test_each_choice_draws_from_its_own_seed(start_bench):
    bench = await start_bench()
    await bench.ask(n=4, seed=7, max_tokens=3)
    seeds = [request.seed for request in bench.engine.requests]
    assert (seeds[0], len(set(seeds))) == (7, 4)
