"""Rows about engines and gateways: budgets, prefix caches, failures; and faults that cannot happen here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import openai
import pytest
from interruptions import sent

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

HELLO = toy_ids("Hello, world")
USER = [{"role": "user", "content": "hi"}]
ROOT = Path(__file__).resolve().parents[3]


async def test_case_11_a_continued_request_has_the_rest_of_its_budget_only(start_bench):
    bench = await start_bench(Play(HELLO, fault=Fault("abort", 4)), Play(HELLO[4:]))
    answer = await bench.ask(max_tokens=10)
    assert [request.max_new_tokens for request in bench.engine.requests] == [10, 6]
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"


async def test_case_11_a_request_cut_with_its_budget_used_up_ends_without_another_engine_call(start_bench):
    bench = await start_bench(Play(HELLO, fault=Fault("abort", 4)))
    answer = await bench.ask(max_tokens=4)
    assert len(bench.engine.requests) == 1
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hell", "length")


async def test_case_42_every_request_is_salted_with_the_version_of_its_route(start_bench):
    bench = await start_bench()
    client = await bench.client()
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    await client.chat.completions.create(**body)
    await bench.proxy.open_route(bench.engine.url, version=1)
    await client.chat.completions.create(**body)
    assert [request.salt.strip("\0") for request in bench.engine.requests] == ["wv:0", "wv:1"]


async def test_case_42_what_goes_on_after_an_update_does_not_read_the_old_weights_cache(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 5)), Play(HELLO[5:]))
    asking = asyncio.create_task(bench.ask())
    await until(sent(bench.engine, 5), "five tokens")
    await bench.update_weights(1)
    await asking
    assert [request.salt.strip("\0") for request in bench.engine.requests] == ["wv:0", "wv:1"]


@pytest.mark.parametrize(("fault", "words"), [("drop", "hold_limit_s"), ("extra_logprobs", "log-probs")])
async def test_case_38_a_failure_ends_one_trajectory_and_not_the_others(start_bench, fault, words):
    """A broken connection is waited for, a broken answer is not; either way the neighbours notice nothing."""
    (mark,) = toy_ids("~", end=False)

    def respond(request):
        return Play(HELLO, fault=Fault(fault, 0) if mark in request.ids else None)

    bench = await start_bench(scripted={"respond": respond}, pipeline={"hold_limit_s": 0.5})
    first, second = await bench.client(), await bench.client()
    failing = asyncio.create_task(
        first.chat.completions.create(model="any", messages=[{"role": "user", "content": "~"}])
    )
    for _ in range(3):
        answer = await second.chat.completions.create(model="any", messages=USER)
        assert answer.choices[0].message.content == "Hello, world"
    with pytest.raises(openai.InternalServerError, match=words):
        await failing
    assert [turn["status"] for turn in await bench.turns()] == ["finished"] * 3


async def test_case_53_a_training_session_without_a_single_token_is_told_loudly(start_bench):
    """Nothing stands between an engine and the proxy that could drop ids, so only an empty answer has none."""
    bench = await start_bench(Play((), finish="stop"))
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=1, target_in_flight=1, samples_per_task=1)
    (sample,) = await control.claim_samples("demo", "train", "w", 1)
    client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
    await client.chat.completions.create(model="any", messages=USER)
    assert await control.finish_sample("demo", sample.session, "done") == "failed"
    status = await control.run_status("demo")
    assert status["books"]["failed"] == {"no_turns": 1}
    assert "without an answer" in status["failures"][0]["last"]["detail"]


def test_case_52_no_gateway_is_part_of_the_proxy():
    """LiteLLM tosses ids where it merges chunks; ours is read from the engine's own wire and from nowhere else."""
    assert "proxy.app" in sys.modules
    assert "litellm" not in sys.modules
    for lock in (ROOT / "requirements").glob("*.lock"):
        assert not [line for line in lock.read_text().splitlines() if line.lower().startswith("litellm")], lock.name
