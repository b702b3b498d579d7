"""What a request asks of sampling reaches the engine or is refused; what cannot move makes the attempt void."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from interruptions import busy, sent

from proxy.testing import toy_ids
from workers.engines.base import FEATURES
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello")
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
SCRIPTED = {"engine": {"kind": "scripted"}}
BOUND = [
    {"response_format": FORMAT},
    {"response_format": {"type": "json_object"}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
]
"""What depends on the output so far, and so cannot go on from a cut."""
FREE = [{"logit_bias": {"104": 2.0}}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["never"]}, {"seed": 7}]
names = {"ids": lambda asked: next(iter(asked))}


async def sample_client(bench):
    """(sample, its client) of a training sample."""
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=1, target_in_flight=1, samples_per_task=1)
    (sample,) = await control.claim_samples("demo", "train", "w", 1)
    bench.session = {"session": sample.session, "api_key": sample.api_key}
    return sample, bench.client_of(bench.session)


async def test_every_feature_reaches_the_engine_as_asked(start_bench):
    bench = await start_bench(Play(HELLO), **SCRIPTED)
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"104": 2.0}, "logprobs": True}
    answer = await bench.ask(response_format=FORMAT, top_logprobs=2, **asked)
    (request,) = bench.engine.requests
    assert json.loads(request.json_schema) == SCHEMA
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    assert (request.logit_bias, request.top_logprobs) == ({104: 2.0}, 2)
    entries = answer.choices[0].logprobs.content
    assert [(e.token, [(t.token, t.logprob) for t in e.top_logprobs]) for e in entries[:2]] == [
        ("H", [("H", -0.25), ("I", -1.25)]),
        ("e", [("e", -0.5), ("f", -1.5)]),
    ]


@pytest.mark.parametrize("asked", [*BOUND, *FREE[:2]], **names)
async def test_what_the_run_s_engine_cannot_do_is_refused_by_name_and_is_no_turn(start_bench, monkeypatch, asked):
    monkeypatch.setitem(FEATURES, "scripted", frozenset())
    bench = await start_bench(**SCRIPTED)
    with pytest.raises(openai.BadRequestError) as failure:
        await bench.ask(**asked)
    assert failure.value.code == "unsupported_parameter"
    assert failure.value.param in asked
    assert await bench.turns() == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", BOUND, **names)
async def test_what_cannot_move_makes_the_attempt_void_when_it_is_cut(start_bench, until, asked, stream):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), **SCRIPTED)
    sample, client = await sample_client(bench)

    async def ask():
        answer = await client.chat.completions.create(model="any", messages=USER, stream=stream, **asked)
        return await bench.read(answer) if stream else answer

    asking = asyncio.create_task(ask())
    await until(sent(bench.engine, 2), "two tokens")
    await bench.update_weights(1)
    with pytest.raises(openai.APIError, match="cannot go on"):
        await asking
    (turn,) = await bench.turns()
    assert (turn["status"], turn["completion_tokens"], len(bench.engine.requests)) == ("failed", 2, 1)
    assert not (await bench.recorded()).trainable()
    # The agent may make of it what it likes: infrastructure never becomes a reward.
    assert await bench.proxy.control.finish_sample("demo", sample.session, "done") == "queued"
    (again,) = await bench.proxy.control.claim_samples("demo", "train", "w", 1)
    assert (again.ordinal, again.sample, again.attempt) == (sample.ordinal, sample.sample, 2)
    assert not busy(bench.proxy)


@pytest.mark.parametrize("asked", BOUND, **names)
async def test_it_goes_on_in_place_when_the_weights_change_under_it(start_bench, until, asked):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 2)), **SCRIPTED)
    asking = asyncio.create_task(bench.ask(**asked))
    await until(sent(bench.engine, 2), "two tokens")
    await bench.route("held")
    bench.engine.version = "1"
    await bench.engine.release()
    await bench.route("open", 1)
    assert (await asking).choices[0].message.content == "Hello"
    assert (await bench.turns())[0]["versions"] == [[0, 2], [1, 4]]


@pytest.mark.parametrize("asked", BOUND, **names)
async def test_before_its_first_token_it_may_move(start_bench, asked):
    bench = await start_bench(Play(HELLO, fault=Fault("drop", 0)), Play(HELLO), **SCRIPTED)
    assert (await bench.ask(**asked)).choices[0].message.content == "Hello"
    assert len(bench.engine.requests) == 2


@pytest.mark.parametrize("asked", FREE, **names)
async def test_what_depends_on_no_output_so_far_goes_on_elsewhere(start_bench, asked):
    bench = await start_bench(Play(HELLO, fault=Fault("drop", 2)), Play(HELLO[2:]), **SCRIPTED)
    answer = await bench.ask(**asked)
    assert answer.choices[0].message.content == "Hello"
    first, second = bench.engine.requests
    assert (first.logit_bias, first.top_logprobs) == (second.logit_bias, second.top_logprobs)
    if "top_logprobs" in asked:
        assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [3] * 5
