"""From a claimed sample to a shard: the ledger, the journal and the object store agree, also after a restart."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from proxy.testing import MemoryStore, ProxyServer, toy_ids
from storage import shards
from storage.errors import ConfigError, InvalidRequest, NotFoundError
from storage.ledger import SampleKey, State
from workers.engines.script import Fault, Play

BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


async def claim(bench, limit=2, **admission):
    limits = {"admit_until": 4, "target_in_flight": 8, "samples_per_task": 2, **admission}
    await bench.proxy.control.set_admission("demo", "train", **limits)
    return await bench.proxy.control.claim_samples("demo", "train", "w", limit)


async def run_agent(bench, sample):
    client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
    messages = list(BODY["messages"])
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="any", messages=messages)


async def score_all(bench, rewards):
    claims = await bench.proxy.control.claim_scores("demo", "r", 10)
    for claim, reward in zip(claims, rewards, strict=True):
        await bench.proxy.control.commit_score("demo", claim.session, reward)
    return claims


def states(bench):
    return [row.state.value for row in bench.proxy.service.ledger.samples("demo", "train")]


async def test_a_group_goes_from_claim_to_one_shard_that_equals_what_the_engine_wrote(start_bench):
    bench = await start_bench(*[Play(toy_ids(text)) for text in ("one", "two", "one", "six")])
    samples = await claim(bench)
    assert [(s.ordinal, s.sample, s.attempt) for s in samples] == [(0, 0, 1), (0, 1, 1)]
    for sample in samples:
        await run_agent(bench, sample)
        assert await bench.proxy.control.finish_sample("demo", sample.session, {"out": 1}) == "finished"
    claims = await score_all(bench, [1.0, 0.0])
    assert [len(claim.transcript) for claim in claims] == [2, 2]
    assert claims[0].transcript[1]["request"]["messages"][1] == {"role": "assistant", "content": "one"}
    assert claims[0].transcript[1]["response"]["message"]["content"] == "two"
    await bench.proxy.service.writer.idle()
    assert states(bench) == ["grouped", "grouped"]

    (data,) = bench.proxy.store.objects.values()
    shard = shards.decode(data)
    written = [tuple(output.ids) for output in bench.engine.outputs.values()]
    spans = [[tuple(shard.spans[i].ids.tolist()) for i in g.spans] for g in shard.generations]
    assert [sum(parts, ()) for parts in spans] == written
    assert [segment["rid"] for g in shard.generations for segment in g.segments] == list(bench.engine.outputs)
    assert [row.reward for row in shard.sessions] == [1.0, 0.0]
    roots = [span for span in shard.spans if span.parent == shards.ROOT]
    assert [span.ids.tolist() for span in roots] == [list(bench.engine.requests[0].ids)]
    audit = await bench.proxy.control.audit("demo")
    tokens = sum(map(len, written))
    assert audit == {
        "sessions": 2,
        "tokens_journalled": tokens,
        "tokens_in_shards": tokens,
        "tokens_lost": 0,
        "mismatches": [],
    }
    status = await bench.proxy.control.run_status("demo")
    assert status["books"]["balanced"]
    assert (status["turns"], status["forks"]) == (4, 0)
    assert status["tokens"]["journalled"] == tokens


async def test_groups_that_were_complete_but_unwritten_are_written_at_the_next_start(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 4)
    for sample in await claim(bench):
        await run_agent(bench, sample)
        await bench.proxy.control.finish_sample("demo", sample.session, None)
    ledger = bench.proxy.service.ledger
    for score in ledger.claim_scores("demo", "r", 10, 60.0):
        ledger.score_sample(score.key, score.attempt, 0.5)
    store = MemoryStore()
    async with ProxyServer(bench.folder, store) as again:
        await again.service.writer.idle()
        assert (await again.control.audit("demo"))["tokens_lost"] == 0
    assert len(store.objects) == 1
    assert states(bench) == ["grouped", "grouped"]


async def test_a_group_with_one_scored_sample_is_filtered(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 4)
    first, second = await claim(bench)
    await bench.proxy.control.fail_sample("demo", second.session, "agent_error", "boom", retry=False)
    await run_agent(bench, first)
    await bench.proxy.control.finish_sample("demo", first.session, None)
    await score_all(bench, [1.0])
    await bench.proxy.service.writer.idle()
    status = await bench.proxy.control.run_status("demo")
    assert status["books"]["filtered"] == {"group_too_small": 1}
    assert status["books"]["failed"] == {"agent_error": 1}
    where = {"stream": "train", "ordinal": 0, "sample": 1, "attempt": 1}
    last = {**where, "session": second.session, "detail": "boom"}
    assert status["failures"] == [{"cause": "agent_error", "attempts": 1, "last": last}]
    assert not bench.proxy.store.objects


@pytest.mark.parametrize("verdict", ["finish", "fail"])
async def test_a_session_hit_by_infrastructure_is_tried_again_whatever_the_agent_made_of_it(start_bench, verdict):
    bench = await start_bench(route=False, pipeline={"hold_limit_s": 0.1})
    (sample,) = await claim(bench, 1)
    client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
    with pytest.raises(Exception, match="hold_limit_s"):
        await client.chat.completions.create(**BODY)
    control = bench.proxy.control
    if verdict == "finish":
        assert await control.finish_sample("demo", sample.session, None) == "queued"
    else:
        assert await control.fail_sample("demo", sample.session, "agent_error", "x", retry=False) == "queued"
    (again,) = await claim(bench, 1)
    assert (again.ordinal, again.sample, again.attempt) == (0, 0, 2)


async def test_a_session_that_asked_the_model_nothing_has_no_reward(start_bench):
    bench = await start_bench()
    (sample,) = await claim(bench, 1)
    assert await bench.proxy.control.finish_sample("demo", sample.session, "made up") == "failed"
    row = bench.proxy.service.ledger.sample(SampleKey("demo", "train", 0, 0))
    assert (row.state, row.cause) == (State.FAILED, "no_turns")


async def test_a_missing_reward_is_missing_and_a_score_needs_one_of_reward_and_cause(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 2)
    (sample,) = await claim(bench, 1)
    await run_agent(bench, sample)
    control = bench.proxy.control
    await control.finish_sample("demo", sample.session, None)
    with pytest.raises(InvalidRequest, match="reward"):
        await control._call("POST", "/control/runs/demo/scores/commit", {"session": sample.session})
    await control.fail_score("demo", sample.session, "reward_missing", "None")
    assert states(bench) == ["failed"]


async def test_samples_whose_hand_out_was_lost_are_put_back(start_bench):
    bench = await start_bench()
    first, second = await claim(bench)
    given = await bench.proxy.service.desk.claim("demo", "train", "w", 1, [first.session])
    assert [(s["ordinal"], s["sample"], s["attempt"]) for s in given] == [(second.ordinal, second.sample, 2)]


async def test_released_workers_lose_their_sessions(start_bench):
    bench = await start_bench()
    (sample,) = await claim(bench, 1)
    await bench.proxy.control.release_worker("demo", "train", "w")
    client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
    with pytest.raises(Exception, match="has ended"):
        await client.chat.completions.create(**BODY)


async def test_evaluation_sessions_sample_as_the_evaluation_says(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 2, sampling={"temperature": 0.8})
    control = bench.proxy.control
    await control.set_admission("demo", "eval/0", admit_until=1, target_in_flight=4, samples_per_task=1)
    (sample,) = await control.claim_samples("demo", "eval/0", "w", 4)
    await run_agent(bench, sample)
    assert bench.engine.requests[0].temperature == 0
    await control.finish_sample("demo", sample.session, None)
    await score_all(bench, [0.25])
    status = await control.run_status("demo")
    assert status["evaluations"] == [{"stream": "eval/0", "samples": 1, "done": 1, "n": 1, "mean": 0.25}]


async def test_a_restarted_proxy_knows_its_routes_sessions_and_half_made_answers(start_bench, until):
    whole = toy_ids("Hello")
    bench = await start_bench(
        Play(toy_ids("first")), Play(whole, fault=Fault("stall", 2)), Play(whole[2:]), Play(toy_ids("last"))
    )
    client = await bench.client()
    messages = list(BODY["messages"])
    first = await client.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    body = {"model": "any", "messages": messages}
    key = {"Authorization": f"Bearer {bench.session['api_key']}"}
    path = f"/s/{bench.session['session']}/v1/chat/completions"
    async with aiohttp.ClientSession(headers=key) as http:
        asking = asyncio.create_task(http.post(bench.proxy.url + path, json=body))
        await until(
            lambda: len(bench.proxy.service.journal.read(bench.session["session"])) >= 7, "two tokens journalled"
        )
        async with ProxyServer(bench.folder, bench.proxy.store) as again:
            async with http.post(again.url + path, json=body, headers={"x-stainless-retry-count": "1"}) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == "Hello"
            session = (await again.service.sessions.get(bench.session["session"])).session
            assert [turn.outcome.value for turn in session.turns] == ["root", "extend"]
            assert tuple(session.turns[1].choices[0].recording.ids) == whole
            messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "x"}]
            async with http.post(again.url + path, json={**body, "messages": messages}) as answer:
                assert answer.status == 200
            assert session.turns[2].outcome.value == "extend"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_run_is_registered_once_and_only_with_a_model_that_loads(start_bench):
    bench = await start_bench()
    control = bench.proxy.control
    await control.create_run("demo", bench.spec, "digest")
    with pytest.raises(ConfigError, match="digest"):
        await control.create_run("demo", bench.spec, "other")
    broken = {**bench.spec, "run": "broken", "model": {"path": str(bench.folder / "nowhere")}}
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await control.create_run("broken", broken, "digest")
    with pytest.raises(ConfigError, match="is that of run 'demo'"):
        await control.create_run("../demo", bench.spec, "digest")
    with pytest.raises(NotFoundError):
        await control.run_status("broken")


async def test_busy_intervals_of_a_node_are_in_the_ledger(start_bench):
    bench = await start_bench(Play(toy_ids("x")))
    await bench.ask()
    await bench.proxy.control.run_status("demo")
    (interval,) = bench.proxy.service.ledger.intervals("demo")
    assert (interval.node, interval.kind) == ("node-lease-a", "generate")
    assert interval.end > interval.start


async def test_turns_and_forks_are_counted_over_restarts(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 4)
    for sample in await claim(bench):
        await run_agent(bench, sample)
    await bench.proxy.control.finish_sample("demo", sample.session, None)
    async with ProxyServer(bench.folder, bench.proxy.store) as again:
        await asyncio.gather(*[task for task in again.service._background if "count" in task.get_name()])
        status = await again.control.run_status("demo")
    assert (status["turns"], status["forks"]) == (4, 0)


async def test_an_agent_that_failed_while_the_proxy_was_away_is_tried_again(start_bench):
    bench = await start_bench()
    (sample,) = await claim(bench, 1)
    async with ProxyServer(bench.folder, bench.proxy.store) as again:
        verdict = await again.control.fail_sample("demo", sample.session, "agent_error", "no connection", retry=False)
    assert verdict == "queued"
