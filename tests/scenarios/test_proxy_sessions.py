"""Sessions of remote agents: opened, limited, ended, rewarded and looked at over the control API."""

from __future__ import annotations

import asyncio
import time

import anthropic
import openai
import pytest

from proxy.testing import ProxyServer, toy_ids
from storage.errors import FencedError, InvalidRequest, NotFoundError, RewardError, SessionClosed
from storage.ledger import SampleKey
from workers.engines.script import Fault, Play

BODY = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


async def ask(bench, session, **changes):
    return await bench.client_of(session).chat.completions.create(**{**BODY, **changes})


async def claim(bench, limit=1):
    control = bench.proxy.control
    await control.set_admission("demo", "train", admit_until=1, target_in_flight=8, samples_per_task=2)
    samples = await control.claim_samples("demo", "train", "w", limit)
    return [{"session": sample.session, "api_key": sample.api_key} for sample in samples]


def sweep(bench, proxy=None):
    return (proxy or bench.proxy).service.housekeeping.sweep()


def expire(bench, session):
    """As if the session's time were over: its policy in the ledger says so."""
    with bench.proxy.service.ledger._db.write() as connection:
        connection.exec_driver_sql(
            "UPDATE sessions SET policy = json_set(policy, '$.expires', 1.0) WHERE session = ?", (session["session"],)
        )


async def test_a_session_is_opened_used_rewarded_and_finished(start_bench):
    bench = await start_bench(Play(toy_ids("Hello")))
    control = bench.proxy.control
    session = await control.create_session("demo", label="try 7")
    await ask(bench, session)
    await control.reward_session(session["session"], 0.5)
    assert await control.finish_session(session["session"]) == "closed"
    view = await control.session(session["session"])
    assert (view["label"], view["closed"], view["sealed"], view["reward"]) == ("try 7", True, True, 0.5)
    assert (view["sample"], view["parent"], view["children"], len(view["turns"])) == (None, None, [], 1)
    assert view["ended"] >= view["created"]
    assert await control.finish_session(session["session"]) == "closed"


async def test_a_session_that_is_asked_for_again_with_its_key_is_the_same_session(start_bench):
    bench = await start_bench(Play(toy_ids("Hello")), Play(toy_ids("again")))
    control = bench.proxy.control
    together = await asyncio.gather(*(control.create_session("demo", idempotency_key="job 7") for _ in range(3)))
    first, *others = together
    assert others == [first, first]
    await ask(bench, first)
    assert await control.create_session("demo", idempotency_key="job 7") == first
    await ask(bench, first)
    assert len((await control.session(first["session"]))["turns"]) == 2
    other = await control.create_session("demo", idempotency_key="job 8")
    assert {*other.values()} & {first["session"], first["api_key"]} == set()
    children = [
        await control.create_session("demo", parent=first["session"], idempotency_key="helper") for _ in range(2)
    ]
    assert (await control.session(first["session"]))["children"] == [children[0]["session"]]
    assert len(await control.sessions("demo")) == 3


async def test_a_reward_is_recorded_once_and_a_missing_one_with_its_cause(start_bench):
    bench = await start_bench()
    control = bench.proxy.control
    first, second = [(await control.create_session("demo"))["session"] for _ in range(2)]
    await control.reward_session(first, 1.0)
    await control.reward_session(first, 1.0)
    with pytest.raises(FencedError, match=r"has reward 1\.0"):
        await control.reward_session(first, 0.0)
    await control.reward_session(second, None, cause="reward_error", detail="boom")
    view = await control.session(second)
    assert (view["reward"], view["cause"]) == (None, "reward_error: boom")
    with pytest.raises(InvalidRequest, match="reward"):
        await control._call("POST", f"/control/sessions/{second}/reward", {})


async def test_a_session_of_a_sample_is_finished_and_scored_by_its_id(start_bench):
    bench = await start_bench(Play(toy_ids("Hello")))
    control = bench.proxy.control
    (session,) = await claim(bench)
    await ask(bench, session)
    assert await control.finish_session(session["session"], {"answer": 4}) == "finished"
    await control.reward_session(session["session"], 1.0)
    row = bench.proxy.service.ledger.sample(SampleKey("demo", "train", 0, 0))
    assert (row.state.value, row.reward, row.output) == ("scored", 1.0, {"answer": 4})
    view = await control.session(session["session"])
    assert view["sample"] == {"stream": "train", "ordinal": 0, "sample": 0, "attempt": 1, "state": "scored"}
    assert view["reward"] == 1.0


async def test_sessions_of_a_run_are_listed_page_by_page(start_bench):
    bench = await start_bench()
    control = bench.proxy.control
    made = sorted([(await control.create_session("demo", label=f"n{i}"))["session"] for i in range(3)])
    await control.finish_session(made[0])
    assert [row["session"] for row in await control.sessions("demo")] == made
    assert [row["session"] for row in await control.sessions("demo", limit=1, after=made[0])] == made[1:2]
    assert [row["session"] for row in await control.sessions("demo", open_only=True)] == made[1:]
    with pytest.raises(NotFoundError):
        await control.sessions("other")


async def test_case_90_the_attempt_is_part_of_a_session_s_identity_and_a_released_one_is_sealed(start_bench):
    bench = await start_bench(Play(toy_ids("first")), Play(toy_ids("second")))
    control = bench.proxy.control
    (first,) = await claim(bench)
    await ask(bench, first)
    await control.release_worker("demo", "train", "w")
    (second,) = await claim(bench)
    await ask(bench, second)
    assert first["session"] != second["session"]
    for late in (ask(bench, first), ask(bench, {**second, "session": first["session"]}), ask(bench, first, n=2)):
        with pytest.raises((openai.PermissionDeniedError, openai.AuthenticationError)):
            await late
    with pytest.raises(openai.PermissionDeniedError) as closed:
        await ask(bench, first)
    assert (closed.value.status_code, closed.value.code) == (403, "session_closed")
    for late in (
        control.finish_session(first["session"], "late"),
        control.finish_sample("demo", first["session"], "late"),
        control.reward_session(first["session"], 1.0),
        control.commit_score("demo", first["session"], 1.0),
    ):
        with pytest.raises(FencedError):
            await late
    one, two = await control.session(first["session"]), await control.session(second["session"])
    assert [(view["sample"]["attempt"], view["sealed"], len(view["turns"])) for view in (one, two)] == [
        (1, True, 1),
        (2, False, 1),
    ]
    assert (one["sample"]["state"], two["sample"]["state"]) == ("replaced", "running")
    assert await control.finish_session(second["session"]) == "finished"


async def test_a_child_is_listed_has_the_rest_of_its_parent_s_time_and_ends_with_it(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 3)
    control = bench.proxy.control
    parent = await control.create_session("demo", time_limit_s=100)
    child = await control.create_session("demo", parent=parent["session"], label="searcher")
    grandchild = await control.create_session("demo", parent=child["session"], max_turns=1)
    with pytest.raises(InvalidRequest, match="time_limit_s"):
        await control.create_session("demo", parent=parent["session"], time_limit_s=101)
    await asyncio.gather(*(ask(bench, session) for session in (parent, child, grandchild)))
    views = [await control.session(session["session"]) for session in (parent, child, grandchild)]
    assert [view["children"] for view in views] == [[child["session"]], [grandchild["session"]], []]
    assert [view["parent"] for view in views] == [None, parent["session"], child["session"]]
    assert len({view["limits"]["expires"] for view in views}) == 1
    await control.finish_session(parent["session"])
    for session in (child, grandchild):
        with pytest.raises(openai.PermissionDeniedError):
            await ask(bench, session)
    assert all(row["closed"] for row in await control.sessions("demo"))
    with pytest.raises(SessionClosed):
        await control.create_session("demo", parent=parent["session"])


async def test_children_of_a_sample_s_session_are_sealed_with_its_attempt_also_after_a_restart(start_bench):
    bench = await start_bench(*[Play(toy_ids("x"))] * 2)
    (session,) = await claim(bench)
    child = await bench.proxy.control.create_session("demo", parent=session["session"])
    async with ProxyServer(bench.folder, bench.proxy.store) as again:
        assert (await again.control.session(session["session"]))["children"] == [child["session"]]
        await again.control.fail_sample("demo", session["session"], "agent_error", "boom", retry=False)
        assert (await again.control.session(child["session"]))["closed"]


async def test_a_turn_limit_narrower_than_the_run_s_is_told_in_each_dialect(start_bench):
    bench = await start_bench(Play(toy_ids("x")), agent={"max_turns": 4})
    control = bench.proxy.control
    session = await control.create_session("demo", max_turns=1)
    await ask(bench, session)
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(bench, session)
    assert (refused.value.code, refused.value.type) == ("session_limit", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        await bench.client_of(session).responses.create(model="any", input="hi", store=False)
    assert refused.value.code == "session_limit"
    url = f"{bench.proxy.url}/s/{session['session']}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session["api_key"], max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as other:
            await client.messages.create(**BODY, max_tokens=5)
    assert other.value.body["error"]["type"] == "invalid_request_error"
    assert "max_turns" in other.value.body["error"]["message"]
    with pytest.raises(InvalidRequest, match="max_turns"):
        await control.create_session("demo", max_turns=5)


async def test_a_token_limit_cuts_the_answer_and_then_refuses(start_bench):
    bench = await start_bench(Play(toy_ids("Hello")), agent={"max_session_tokens": 300})
    session = await bench.proxy.control.create_session("demo")
    prompt = (await ask(bench, session)).usage.prompt_tokens
    bench.engine.add(Play(toy_ids("y" * 200, end=False)))
    limited = await bench.proxy.control.create_session("demo", max_session_tokens=prompt + 7)
    answer = await ask(bench, limited)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
    with pytest.raises(openai.BadRequestError, match="max_session_tokens"):
        await ask(bench, limited)


async def test_a_session_whose_time_is_over_answers_nothing_and_is_closed(start_bench, monkeypatch):
    bench = await start_bench()
    session = await bench.proxy.control.create_session("demo", time_limit_s=50)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 51)
    with pytest.raises(openai.BadRequestError, match="time is over"):
        await ask(bench, session)
    await sweep(bench)
    with pytest.raises(openai.PermissionDeniedError):
        await ask(bench, session)
    assert (await bench.proxy.control.session(session["session"]))["closed"]


async def test_a_sample_whose_session_expires_has_failed_with_that_cause(start_bench, until):
    bench = await start_bench(Play(toy_ids("Hello"), fault=Fault("stall", 2)))
    (session,) = await claim(bench)
    asking = asyncio.create_task(ask(bench, session))
    await until(lambda: bench.engine.requests, "the engine reads the prompt")
    expire(bench, session)
    await sweep(bench)
    with pytest.raises(openai.APIStatusError):
        await asking
    row = bench.proxy.service.ledger.sample(SampleKey("demo", "train", 0, 0))
    assert (row.state.value, row.cause) == ("failed", "time_limit")
    await sweep(bench)


async def test_an_expired_session_that_lived_through_a_restart_is_tried_again(start_bench):
    bench = await start_bench()
    (session,) = await claim(bench)
    expire(bench, session)
    async with ProxyServer(bench.folder, bench.proxy.store) as again:
        await sweep(bench, again)
    row = bench.proxy.service.ledger.sample(SampleKey("demo", "train", 0, 0))
    assert (row.state.value, row.attempt) == ("queued", 2)


async def test_sessions_that_the_end_of_a_run_closed_are_sealed(start_bench):
    bench = await start_bench(Play(toy_ids("x")))
    (session,) = await claim(bench)
    await ask(bench, session)
    bench.proxy.service.ledger.end_run("demo")
    await sweep(bench)
    with pytest.raises(openai.PermissionDeniedError):
        await ask(bench, session)
    assert not bench.proxy.service.sessions.live("demo")


async def test_a_reward_that_is_no_number_is_refused(start_bench):
    bench = await start_bench()
    session = await bench.proxy.control.create_session("demo")
    with pytest.raises((RewardError, InvalidRequest)):
        await bench.proxy.control._call(
            "POST", f"/control/sessions/{session['session']}/reward", {"reward": "Infinity"}
        )
