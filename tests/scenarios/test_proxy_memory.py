"""What a proxy holds in memory is bounded; what it dropped comes back from the journal as it was."""

from __future__ import annotations

import gc

import pytest

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play

USER = [{"role": "user", "content": "hi"}]


async def turn(client, messages, **options):
    answer = await client.chat.completions.create(model="any", messages=messages, **options)
    reply = answer.choices[0].message.model_dump(exclude_none=True)
    return [*messages, reply, {"role": "user", "content": "more"}], answer


def held(bench):
    gc.collect()
    return sorted(bench.proxy.service.sessions._live)


async def test_sessions_leave_memory_when_their_group_is_in_its_shard(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 2)
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=1, target_in_flight=2, samples_per_task=2)
    samples = await control.claim_samples("demo", "train", "w", 2)
    for sample in samples:
        client = bench.client_of({"session": sample.session, "api_key": sample.api_key})
        await turn(client, USER)
        await control.finish_sample("demo", sample.session, None)
    assert held(bench) == sorted(sample.session for sample in samples)
    for score in await control.claim_scores("demo", "r", 2):
        await control.commit_score("demo", score.session, 1.0)
    await bench.proxy.service.writer.idle()
    assert held(bench) == []


async def test_idle_sessions_beyond_the_bound_are_dropped_and_go_on_as_they_were(start_bench):
    bench = await start_bench(*[Play(toy_ids(f"answer {i}")) for i in range(5)])
    sessions = bench.proxy.service.sessions
    sessions.keep_tokens = 0
    first = await bench.client()
    mine = bench.session["session"]
    messages, _ = await turn(first, USER)
    before = await bench.turns()
    second = await bench.client()
    await turn(second, USER)
    assert held(bench) == [bench.session["session"]]
    status = await bench.proxy.control.run_status("demo")
    assert status["sessions_in_flight"] == 2
    await turn(first, messages)
    assert held(bench) == [mine]
    live = await sessions.get(mine)
    assert [one.outcome.value for one in live.session.turns] == ["root", "extend"]
    assert not live.interrupted
    bench.session = {"session": mine}
    assert (await bench.turns())[0] == before[0]


async def test_a_dropped_session_of_a_sample_is_no_infrastructure_failure(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 2)
    bench.proxy.service.sessions.keep_tokens = 0
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=1, target_in_flight=2, samples_per_task=2)
    samples = await control.claim_samples("demo", "train", "w", 2)
    assert held(bench) == [samples[1].session]
    assert await control.fail_sample("demo", samples[0].session, "agent_error", "boom", retry=False) == "failed"


async def test_a_session_that_generates_is_not_dropped_and_whoever_uses_one_has_the_only_one(start_bench, until):
    bench = await start_bench(Play(toy_ids("Hello"), fault=Fault("stall", 2)), Play(toy_ids("x")))
    sessions = bench.proxy.service.sessions
    sessions.keep_tokens = 0
    client = await bench.client()
    mine = bench.session["session"]
    stream = await client.chat.completions.create(model="any", messages=USER, stream=True)
    await until(lambda: bench.engine.requests, "the engine reads the prompt")
    used = await sessions.get((await bench.proxy.control.create_session("demo"))["session"])
    await turn(await bench.client(), USER)
    assert mine in held(bench)
    assert await sessions.get(used.record.session) is used
    await stream.close()


async def test_an_answer_whose_client_went_away_is_continued_after_its_session_was_dropped(start_bench, until):
    whole = toy_ids("Hello")
    bench = await start_bench(Play(whole, fault=Fault("stall", 2)), Play(toy_ids("x")), Play(whole[2:]))
    sessions = bench.proxy.service.sessions
    sessions.keep_tokens = 0
    client = await bench.client()
    mine = bench.session["session"]
    stream = await client.chat.completions.create(model="any", messages=USER, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    await until(lambda: not sessions._live[mine].running(), "the engine was told to stop")
    await turn(await bench.client(), USER)
    assert mine not in held(bench)
    retry = {"extra_headers": {"x-stainless-retry-count": "1"}, "stream": True}
    chunks = await bench.read(await client.chat.completions.create(model="any", messages=USER, **retry))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert tuple((await sessions.get(mine)).session.turns[0].choices[0].recording.ids) == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_old_turns_are_not_held_and_a_retry_of_one_is_told_the_same(start_bench, stream):
    bench = await start_bench(*[Play(toy_ids(f"answer {i}")) for i in range(12)])
    client = await bench.client()
    raw = client.chat.completions.with_raw_response
    first = await raw.create(model="any", messages=USER, stream=stream)
    told = await first.http_response.aread()
    messages = USER
    for index in range(1, 12):
        messages = [{"role": "user", "content": f"question {index}"}]
        await turn(client, messages)
    live = await bench.proxy.service.sessions.get(bench.session["session"])
    assert len(live._answering) < 12
    retry = {"x-stainless-retry-count": "1"}
    again = await raw.create(model="any", messages=USER, stream=stream, extra_headers=retry)
    assert await again.http_response.aread() == told
    assert len(bench.engine.requests) == 12
