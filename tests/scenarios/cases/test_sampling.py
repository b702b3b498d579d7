"""Rows about sampling: what was asked, what was used, and what the log-probs are of."""

from __future__ import annotations

import pytest
from spoken import CHAT

from proxy.testing import toy_ids
from workers.engines.script import Play

HELLO = toy_ids("Hello")


async def test_case_71_72_what_the_agent_asked_and_what_was_used_are_both_recorded_and_logprobs_are_not_rescaled(
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


async def test_case_56_logprobs_of_a_stream_are_those_of_the_whole_answer(start_bench):
    bench = await start_bench(Play(toy_ids("abc")), Play(toy_ids("abc")))
    whole = await bench.ask(logprobs=True)
    chunks = await bench.read(await bench.ask(logprobs=True, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in whole.choices[0].logprobs.content]
    silent = await bench.ask()
    assert silent.choices[0].logprobs is None


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (0.6, False)])
async def test_case_73_a_greedy_turn_is_marked_and_keeps_the_engine_s_log_probs(start_bench, temperature, greedy):
    bench = await start_bench(Play(HELLO), evaluation={"temperature": temperature})
    control = bench.proxy.control
    await control.set_admission("demo", "eval/0", admit_until=1, target_in_flight=1, samples_per_task=1)
    (sample,) = await control.claim_samples("demo", "eval/0", "w", 1)
    bench.session = {"session": sample.session, "api_key": sample.api_key}
    await bench.client_of(bench.session).chat.completions.create(**CHAT.body(temperature=0.3))
    used = (await bench.turns())[0]["used"]
    assert (used["greedy"], used["temperature"]) == (greedy, temperature)
    assert bench.engine.requests[0].temperature == temperature
    (output,) = bench.engine.outputs.values()
    assert (await bench.recorded()).turns[0].choices[0].recording.logprobs == output.logprobs


@pytest.mark.parametrize(
    ("top_p", "asked", "marks"),
    [
        (1.0, {}, (False, False)),
        (0.9, {}, (True, False)),
        (1.0, {"logit_bias": {"104": 1}}, (False, True)),
        (1.0, {"presence_penalty": 0.5}, (False, True)),
        (1.0, {"frequency_penalty": 0.5}, (False, True)),
        (1.0, {"response_format": {"type": "json_object"}}, (False, True)),
    ],
    ids=str,
)
async def test_case_72_a_turn_whose_log_probs_are_not_the_whole_policy_s_is_marked(start_bench, top_p, asked, marks):
    """Top-p is the run's own; the other features are always the agent's."""
    bench = await start_bench(Play(HELLO), engine={"kind": "scripted"}, sampling={"top_p": top_p})
    await bench.ask(**asked)
    used = (await bench.turns())[0]["used"]
    assert (used["truncated_sampling"], used["shaped_sampling"]) == marks
