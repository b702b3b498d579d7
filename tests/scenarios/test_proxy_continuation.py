"""A generation outlives its engine, its route and a weight update; the agent only waits."""

from __future__ import annotations

import asyncio

import openai
import pytest

from proxy.testing import toy_ids
from storage.errors import FencedError
from workers.engines.script import Fault, Play
from workers.engines.scripted import ScriptedEngine

HELLO = toy_ids("Hello, world")


def sent(engine, count):
    return lambda: any(len(output.ids) >= count for output in engine.outputs.values())


@pytest.mark.parametrize("kind", ["death", "drop", "no_final"])
async def test_a_generation_continues_on_another_engine_when_its_own_dies(start_bench, kind):
    bench = await start_bench(Play(HELLO, fault=Fault(kind, 5)))
    async with ScriptedEngine([Play(HELLO[5:])], vocab_size=259) as other:
        await bench.proxy.open_route(other.url, lease="lease-b")
        answer = await bench.ask()
    assert answer.choices[0].message.content == "Hello, world"
    segments = (await bench.turns())[0]["segments"]
    assert [(segment["lease"], segment["start"], segment["end"]) for segment in segments] == [
        ("lease-a", 0, 5),
        ("lease-b", 5, len(HELLO)),
    ]


async def test_an_engine_that_dies_right_after_the_end_of_turn_token_is_not_asked_for_more(start_bench):
    bench = await start_bench(Play((*HELLO, 5), fault=Fault("drop", len(HELLO))))
    answer = await bench.ask()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello, world", "stop")
    assert len(bench.engine.requests) == 1


async def test_closing_a_route_moves_what_runs_on_it_and_returns_when_it_is_gone(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 5)))
    async with ScriptedEngine([Play(HELLO[5:])], vocab_size=259, weight_version="1") as other:
        stream = await bench.ask(stream=True)
        await until(sent(bench.engine, 5), "five tokens on the first engine")
        await bench.proxy.open_route(other.url, lease="lease-b", version=1)
        await bench.proxy.control.put_route(
            "lease-a", run="demo", node="node-lease-a", url=bench.engine.url, epoch=1, version=0, state="closed"
        )
        routes = {route["lease"]: route["live"] for route in await bench.proxy.control.routes()}
        assert routes["lease-a"] == 0
        chunks = await bench.read(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    turn = (await bench.turns())[0]
    assert [segment["lease"] for segment in turn["segments"]] == ["lease-a", "lease-b"]
    assert turn["versions"] == [[0, 5], [1, 8]]
    assert list(other.requests[0].ids) == list(bench.engine.requests[0].ids) + list(HELLO[:5])


async def test_a_held_route_lets_what_runs_go_on_and_starts_nothing_new(start_bench, until):
    bench = await start_bench(Play(HELLO, fault=Fault("stall", 5)), Play(toy_ids("second")))
    first = asyncio.create_task(bench.ask())
    await until(sent(bench.engine, 5), "five tokens")
    hold = {"run": "demo", "node": "node-lease-a", "url": bench.engine.url, "epoch": 1, "engine_kind": "scripted"}
    await bench.proxy.control.put_route("lease-a", **hold, version=0, state="held")
    second = asyncio.create_task(bench.ask())
    await bench.engine.release()
    assert (await first).choices[0].message.content == "Hello, world"
    assert len(bench.engine.requests) == 1
    await bench.proxy.control.put_route("lease-a", **hold, version=1, state="open")
    assert (await second).choices[0].message.content == "second"


async def test_a_generation_only_starts_on_an_engine_that_serves_its_run(start_bench, spec_for, until):
    bench = await start_bench(route=False)
    control = bench.proxy.control
    await control.create_run("other", {**spec_for(bench.folder), "run": "other"}, "digest")
    async with ScriptedEngine([Play(toy_ids("other"))], vocab_size=259) as engine:
        await bench.proxy.open_route(engine.url, run="other", lease="lease-b")
        waiting = asyncio.create_task(bench.ask())
        stranger = bench.client_of(await control.create_session("other"))
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        assert (await stranger.chat.completions.create(**body)).choices[0].message.content == "other"
        assert not waiting.done()
        await bench.proxy.open_route(bench.engine.url)
        await waiting
        assert (len(bench.engine.requests), len(engine.requests)) == (1, 1)
    assert [route["run"] for route in (await control.run_status("demo"))["routes"]] == ["demo"]


async def test_a_second_turn_returns_to_the_engine_that_has_its_prefix(start_bench):
    bench = await start_bench(Play(toy_ids("one")), Play(toy_ids("two")))
    async with ScriptedEngine(vocab_size=259) as other:
        client = await bench.client()
        messages = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="any", messages=messages)
        await bench.proxy.open_route(other.url, lease="lease-b")
        messages += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="any", messages=messages)
        assert not other.requests


async def test_a_wait_for_a_route_ends_at_its_named_limit_as_infrastructure(start_bench):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.2})
    with pytest.raises(openai.InternalServerError, match="hold_limit_s") as failure:
        await bench.ask()
    assert failure.value.response.headers["x-should-retry"] == "false"


async def test_a_route_of_an_old_epoch_is_refused(start_bench):
    bench = await start_bench()
    await bench.proxy.open_route(bench.engine.url, lease="lease-new", epoch=3)
    node = "node-lease-new"
    with pytest.raises(FencedError, match="epoch"):
        await bench.proxy.control.put_route(
            "lease-old", run="demo", node=node, url=bench.engine.url, epoch=2, version=0, state="open"
        )


async def test_seeds_repeat_with_the_run_and_differ_between_segments(start_bench):
    bench = await start_bench(Play(HELLO, fault=Fault("abort", 3)), Play(HELLO[3:]))
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=4, target_in_flight=8, samples_per_task=2)
    first, second = await control.claim_samples("demo", "train", "w", 2)
    for sample in (first, second):
        client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    seeds = [request.seed for request in bench.engine.requests]
    assert len(set(seeds)) == 3
    await control.fail_sample("demo", first.session, "test", "", retry=True)
    (again,) = await control.claim_samples("demo", "train", "w", 1)
    assert (again.ordinal, again.sample, again.attempt) == (0, 0, 2)
    client = bench.client_of({"session": again.session, "api_key": again.api_key})
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert bench.engine.requests[-1].seed == seeds[0]
