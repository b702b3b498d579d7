"""Several proxies over one PostgreSQL database: relaying, taking over, routes that are in force everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack

import aiohttp
import openai
import orjson
import pytest
from spoken import DIALECTS

from proxy.client import ControlClient
from proxy.testing import CONTROL_KEY, MemoryStore, ProxyServer, toy_ids, write_toy_model
from storage.errors import DeadlineError, FencedError, StorageError
from storage.journal import JournalRecord
from storage.ledger import Route
from workers.engines.script import Fault, Play, hash_play
from workers.engines.scripted import ScriptedEngine

USER = [{"role": "user", "content": "hi"}]
BODY = {"model": "any", "messages": USER}
HELLO = toy_ids("Hello")
CLAIM = orjson.dumps({"stream": "train", "worker": "w", "limit": 2})


class Cluster:
    """Three proxies, one engine, one run."""

    def __init__(self, proxies, engine, stack):
        self.proxies = proxies
        self.engine = engine
        self._stack = stack

    def client(self, proxy, session, **options):
        """A client that reaches `proxy` and is known by its key alone."""
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        base = {"max_retries": 0, "timeout": 20, "http_client": plain, "base_url": f"{proxy.url}/v1"}
        client = openai.AsyncOpenAI(api_key=session["api_key"], **{**base, **options})
        self._stack.push_async_callback(client.close)
        return client

    async def ask(self, proxy, session, **changes):
        return await self.client(proxy, session).chat.completions.create(**{**BODY, **changes})

    async def claim(self, proxy, limit=1):
        await proxy.control.set_admission("demo", "train", admit_until=4, target_in_flight=8, samples_per_task=2)
        samples = await proxy.control.claim_samples("demo", "train", "w", limit)
        return [{"session": sample.session, "api_key": sample.api_key} for sample in samples]

    async def stop(self, index):
        """End one proxy as SIGTERM would."""
        proxy = self.proxies.pop(index)
        await proxy.__aexit__(None, None, None)

    def go_dumb(self, proxy):
        """From now on the proxy cannot renew its lease."""
        proxy.service.ledger.renew_proxy = self._no_renewal

    def _no_renewal(self, *_):
        raise StorageError("the database cannot be reached")


@pytest.fixture
async def start(tmp_path, postgres, spec_for, monkeypatch):
    for name, value in {"LEASE_S": 2.0, "RENEW_S": 0.2, "MARGIN_S": 0.8}.items():
        monkeypatch.setattr(f"proxy.peers.{name}", value)
    write_toy_model(tmp_path / "model")
    url = postgres.database()
    async with AsyncExitStack() as stack:

        async def begin(*plays, proxies=3, route=True, delay_s=0.0, **spec):
            engine = await stack.enter_async_context(ScriptedEngine(plays, vocab_size=259, delay_s=delay_s))
            store = MemoryStore()
            made = []
            for _ in range(proxies):
                proxy = ProxyServer(tmp_path, store, database=url)
                made.append(await proxy.__aenter__())
            cluster = Cluster(made, engine, stack)

            async def stop():
                while cluster.proxies:
                    await cluster.stop(-1)

            stack.push_async_callback(stop)
            await made[0].control.create_run("demo", spec_for(tmp_path, **spec), "digest")
            if route:
                await made[0].open_route(engine.url)
            return cluster

        yield begin
    postgres.drop(url)


async def test_a_request_that_reached_another_proxy_is_answered_by_its_session_s_owner(start):
    cluster = await start(*[Play(HELLO)] * 4)
    first, second, third = cluster.proxies
    session = await first.control.create_session("demo")
    assert session["base_url"].startswith(first.url)
    whole = await cluster.ask(second, session)
    assert whole.choices[0].message.content == "Hello"
    stream = await cluster.ask(third, session, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    assert [model.id async for model in cluster.client(second, session).models.list()] == ["demo"]
    url = f"{third.url}/s/{session['session']}/v1"
    await cluster.client(third, session, base_url=url).chat.completions.create(**BODY)
    assert len((await first.control.session(session["session"]))["turns"]) == 3
    assert [session["session"] in proxy.service.sessions._live for proxy in cluster.proxies] == [True, False, False]


async def test_what_the_owner_says_passes_byte_by_byte(start):
    cluster = await start(Play(HELLO), Play(HELLO))
    first, second, _ = cluster.proxies
    session = await first.control.create_session("demo")
    key = {"Authorization": f"Bearer {session['api_key']}", "idempotency-key": "one"}
    async with aiohttp.ClientSession(headers=key) as http:
        told = []
        for proxy in (first, second):
            async with http.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "stream": True}) as answer:
                told.append((answer.status, answer.headers["content-type"], await answer.read()))
        refused = []
        for proxy in (first, second):
            async with http.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "nonsense": 1}) as answer:
                kept = {k.lower(): v for k, v in answer.headers.items() if k.lower() not in ("date", "server")}
                refused.append((answer.status, kept, await answer.read()))
    assert told[0] == told[1]
    assert refused[0] == refused[1]
    assert refused[0][0] == 400
    assert len(cluster.engine.requests) == 1


async def test_a_client_that_leaves_the_relay_leaves_the_engine(start, until):
    cluster = await start(Play(HELLO, fault=Fault("stall", 2)))
    first, second, _ = cluster.proxies
    session = await first.control.create_session("demo")
    stream = await cluster.ask(second, session, stream=True)
    assert await anext(aiter(stream))
    await stream.close()
    (output,) = cluster.engine.outputs.values()
    await until(lambda: output.aborted or output.finish is not None, "the engine was told")


async def test_a_session_of_a_stopped_proxy_goes_on_at_another(start):
    cluster = await start(Play(HELLO), Play(toy_ids("again")))
    session = await cluster.proxies[0].control.create_session("demo")
    answer = await cluster.ask(cluster.proxies[1], session)
    messages = [*USER, answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    await cluster.stop(0)
    heir = cluster.proxies[0]
    assert (await cluster.ask(cluster.proxies[1], session, messages=messages)).choices[0].message.content == "again"
    record = heir.service.ledger.session(session["session"])
    assert record.proxy == cluster.proxies[1].service.peers.id
    view = await heir.control.session(session["session"])
    assert [turn["outcome"] for turn in view["turns"]] == ["root", "extend"]


async def test_a_generation_is_continued_by_who_takes_its_session_over(start, until):
    cluster = await start(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    first, second, third = cluster.proxies
    session = await first.control.create_session("demo")
    asking = asyncio.create_task(cluster.ask(third, session))
    journal = first.service.journal
    await until(lambda: sum(row.kind == "tokens" for row in journal.read(session["session"])), "two tokens")
    cluster.go_dumb(first)
    assert (await asking).choices[0].message.content == "Hello"
    retry = {"x-stainless-retry-count": "1"}
    answer = await cluster.ask(second, session, extra_headers=retry)
    assert answer.choices[0].message.content == "Hello"
    recorded = [token for row in journal.read(session["session"]) if row.kind == "tokens" for token in row.ids]
    assert tuple(recorded) == HELLO
    view = await third.control.session(session["session"])
    assert [segment["number"] for segment in view["turns"][0]["segments"]] == [0, 1]


async def test_a_late_append_of_the_old_owner_is_refused_and_its_client_gets_the_new_one_s_answer(start, until):
    cluster = await start(delay_s=0.03)
    first, second, _ = cluster.proxies
    session = await first.control.create_session("demo")
    asking = asyncio.create_task(cluster.ask(first, session, max_tokens=30))
    journal = first.service.journal
    await until(lambda: sum(row.kind == "tokens" for row in journal.read(session["session"])) > 2, "some tokens")
    # As if the first proxy had stood still for longer than its lease, and gone on as if nothing had happened.
    second.service.ledger.own_session(session["session"], second.service.peers.id, first.service.peers.id)
    retry = {"x-stainless-retry-count": "1"}
    answer = await cluster.ask(second, session, max_tokens=30, extra_headers=retry)
    assert (await asking).choices == answer.choices
    recorded = [token for row in journal.read(session["session"]) if row.kind == "tokens" for token in row.ids]
    assert tuple(recorded) == hash_play(cluster.engine.requests[0], 259).ids
    assert answer.usage.completion_tokens == 30
    assert session["session"] not in first.service.sessions._live
    again = {**BODY, "max_tokens": 2, "messages": [{"role": "user", "content": "more"}]}
    await cluster.ask(first, session, **again)
    assert len((await second.control.session(session["session"]))["turns"]) == 2


async def test_a_session_that_came_back_is_not_lost_to_what_its_former_self_still_writes(start, until):
    cluster = await start(delay_s=0.03)
    first, *_ = cluster.proxies
    session = await first.control.create_session("demo")
    asking = asyncio.create_task(cluster.ask(first, session, max_tokens=30))
    journal, ledger = first.service.journal, first.service.ledger
    await until(lambda: sum(row.kind == "tokens" for row in journal.read(session["session"])) > 2, "some tokens")
    old = first.service.sessions._live[session["session"]]
    first.service.sessions.lose(session["session"], StorageError("the lease ran out"))
    retry = {"x-stainless-retry-count": "1"}
    answer = await cluster.ask(first, session, max_tokens=30, extra_headers=retry)
    with pytest.raises(FencedError):
        await old.journal.append(JournalRecord(session["session"], "late", {}))
    assert answer.usage.completion_tokens == 30
    assert first.service.sessions._live[session["session"]] is not old
    assert ledger.session(session["session"]).proxy == first.service.peers.id
    assert (await asking).choices == answer.choices


@pytest.mark.parametrize("asked_at", [0, 1], ids=["the owner", "another proxy"])
@pytest.mark.parametrize("spoken", DIALECTS, ids=str)
async def test_a_stream_whose_owner_loses_its_lease_is_told_on_as_if_nothing_had_happened(
    start, until, monkeypatch, spoken, asked_at
):
    monkeypatch.setattr("proxy.app.KEEP_ALIVE_S", 0.1)
    cluster = await start(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    first, second, _ = cluster.proxies
    session = await first.control.create_session("demo")
    key = {"Authorization": f"Bearer {session['api_key']}"}
    url = f"{cluster.proxies[asked_at].url}{spoken.path}"
    async with aiohttp.ClientSession(headers=key) as http, http.post(url, json=spoken.body(stream=True)) as stream:
        told = await stream.content.readuntil(b"\n\n")
        journal = first.service.journal
        await until(lambda: sum(row.kind == "tokens" for row in journal.read(session["session"])), "two tokens")
        cluster.go_dumb(first)
        told += await stream.read()
        assert stream.status == 200
    retry = {"x-stainless-retry-count": "1"}
    async with (
        aiohttp.ClientSession(headers={**key, **retry}) as http,
        http.post(f"{second.url}{spoken.path}", json=spoken.body(stream=True)) as whole,
    ):
        assert without_keep_alives(told) == await whole.read()
    assert spoken.said(told) == "Hello"
    recorded = [token for row in journal.read(session["session"]) if row.kind == "tokens" for token in row.ids]
    assert tuple(recorded) == HELLO


async def test_two_equal_requests_whose_owner_loses_its_lease_each_get_their_own_stream_to_its_end(start, until):
    cluster = await start(delay_s=0.05)
    first, *_ = cluster.proxies
    session = await first.control.create_session("demo")
    key = {"Authorization": f"Bearer {session['api_key']}"}
    body = {**BODY, "stream": True, "max_tokens": 60}
    async with aiohttp.ClientSession(headers=key) as http:

        async def ask():
            async with http.post(f"{first.url}/v1/chat/completions", json=body) as stream:
                return await stream.read()

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        journal = first.service.journal
        await until(lambda: sum(row.kind == "tokens" for row in journal.read(session["session"])) > 12, "some tokens")
        cluster.go_dumb(first)
        told = await asyncio.gather(*asking)
        turns = (await cluster.proxies[1].control.session(session["session"]))["turns"]
    assert len({turn["generation"] for turn in turns}) == 3
    assert sorted(one.count(b"data: ") for one in told)[0] > 3
    for one in told:
        ids = {orjson.loads(line[6:])["id"] for line in one.split(b"\n") if line.startswith(b"data: {")}
        assert len(ids) == 1


def without_keep_alives(stream):
    events = stream.split(b"\n\n")
    return b"\n\n".join(event for event in events if not event.startswith((b":", b"event: ping")))


async def test_of_two_that_take_a_session_over_one_gets_it(start):
    cluster = await start(*[Play(HELLO)] * 4)
    session = await cluster.proxies[0].control.create_session("demo")
    await cluster.stop(0)
    await asyncio.gather(*(cluster.ask(proxy, session) for proxy in cluster.proxies for _ in range(2)))
    view = await cluster.proxies[0].control.session(session["session"])
    assert len(view["turns"]) == 4
    assert [session["session"] in proxy.service.sessions._live for proxy in cluster.proxies].count(True) == 1


async def test_a_hold_at_one_proxy_is_in_force_at_all(start, until):
    cluster = await start()
    first, second, _ = cluster.proxies
    session = await second.control.create_session("demo")
    route = {"run": "demo", "node": "node-lease-a", "url": cluster.engine.url, "engine_kind": "scripted"}
    await first.control.put_route("lease-a", **route, epoch=1, version=0, state="held")
    assert [row["state"] for proxy in cluster.proxies for row in await proxy.control.routes()] == ["held"] * 3
    asking = asyncio.create_task(cluster.ask(second, session, max_tokens=3))
    await until(lambda: second.service.sessions._live[session["session"]].running(), "the request waits")
    assert not cluster.engine.requests
    await first.control.put_route("lease-a", **route, epoch=1, version=1, state="open")
    await asking
    (turn,) = (await second.control.session(session["session"]))["turns"]
    assert turn["segments"][0]["version"] == 1


async def test_closing_a_route_at_one_proxy_cuts_what_runs_at_another_before_it_returns(start, until):
    cluster = await start(Play(HELLO, fault=Fault("stall", 2)), Play(HELLO[2:]))
    first, second, _ = cluster.proxies
    session = await second.control.create_session("demo")
    asking = asyncio.create_task(cluster.ask(second, session))
    await until(lambda: cluster.engine.requests, "the engine reads the prompt")
    route = {"run": "demo", "node": "node-lease-a", "url": cluster.engine.url, "engine_kind": "scripted"}
    await first.control.put_route("lease-a", **route, epoch=1, version=0, state="closed")
    assert [row["live"] for row in await second.control.routes()] == [0]
    await first.control.delete_route("lease-a", 1)
    assert await second.control.routes() == []
    await first.open_route(cluster.engine.url, lease="lease-b", epoch=2)
    assert (await asking).choices[0].message.content == "Hello"


async def test_a_route_is_in_force_when_a_proxy_that_does_not_answer_has_lost_its_lease(start):
    cluster = await start(route=False, proxies=2)
    first = cluster.proxies[0]
    first.service.ledger.register_proxy("dead", "http://127.0.0.1:9", 1.5)
    (dead,) = [proxy for proxy in first.service.ledger.proxies() if proxy.proxy == "dead"]
    await first.open_route(cluster.engine.url)
    assert time.time() >= dead.lease_until


async def test_a_route_that_a_living_proxy_never_acts_on_is_an_error_with_its_name(start, monkeypatch):
    cluster = await start(route=False, proxies=2)
    first, second = cluster.proxies
    monkeypatch.setattr("proxy.peers.DRAIN_LIMIT_S", 0.5)
    second.service.routes.__class__ = type("Stuck", (type(second.service.routes),), {"in_force": 0})
    with pytest.raises(DeadlineError, match=second.url):
        await first.service.routes.put(Route("lease", "demo", "n", cluster.engine.url, "scripted", 1, 0, "open"))


async def test_a_sample_is_claimed_finished_and_scored_at_any_proxy(start):
    cluster = await start(*[Play(HELLO)] * 2)
    first, second, third = cluster.proxies
    sessions = await cluster.claim(first, 2)
    for session in sessions:
        await cluster.ask(third, session)
        assert await second.control.finish_sample("demo", session["session"], "out") == "finished"
    claims = await third.control.claim_scores("demo", "r", 2)
    assert [len(claim.transcript) for claim in claims] == [1, 1]
    await second.control.commit_score("demo", claims[0].session, 1.0)
    await third.control.commit_score("demo", claims[1].session, 0.0)
    await third.service.writer.idle()
    for proxy in cluster.proxies:
        status = await proxy.control.run_status("demo")
        assert (status["turns"], status["tokens"]["journalled"], status["sessions_in_flight"]) == (2, 12, 0)
        assert status["tokens"]["delivered"] == 12
        assert sorted(row["url"] for row in status["proxies"]) == sorted(each.url for each in cluster.proxies)
    audit = await first.control.audit("demo")
    assert (audit["tokens_in_shards"], audit["tokens_lost"]) == (12, 0)


async def test_a_worker_that_is_released_at_one_proxy_loses_its_sessions_at_all(start):
    cluster = await start(Play(HELLO))
    first, second, _ = cluster.proxies
    (session,) = await cluster.claim(first)
    await cluster.ask(first, session)
    await second.control.release_worker("demo", "train", "w")
    for proxy in cluster.proxies:
        with pytest.raises(openai.PermissionDeniedError):
            await cluster.ask(proxy, session)
        with pytest.raises(FencedError):
            await proxy.control.finish_sample("demo", session["session"], None)


async def test_a_child_is_owned_where_its_parent_is_and_ends_with_it(start):
    cluster = await start()
    first, second, third = cluster.proxies
    parent = await first.control.create_session("demo")
    child = await second.control.create_session("demo", parent=parent["session"])
    assert child["base_url"].startswith(first.url)
    assert await third.control.finish_session(parent["session"]) == "closed"
    assert (await second.control.session(child["session"]))["closed"]


async def test_an_expired_session_of_a_dead_proxy_is_ended_by_another(start):
    cluster = await start()
    session = await cluster.proxies[0].control.create_session("demo", time_limit_s=0.01)
    await cluster.stop(0)
    await asyncio.sleep(0.02)
    await asyncio.gather(*(proxy.service.housekeeping.sweep() for proxy in cluster.proxies))
    assert (await cluster.proxies[0].control.session(session["session"]))["closed"]


async def test_a_proxy_that_got_its_lease_back_serves_again(start, until):
    cluster = await start(*[Play(HELLO)] * 2, proxies=1)
    (proxy,) = cluster.proxies
    session = await proxy.control.create_session("demo")
    ledger = proxy.service.ledger
    cluster.go_dumb(proxy)
    await until(lambda: not ledger.proxies(), "the lease has run out")
    asking = asyncio.create_task(cluster.ask(proxy, session))
    assert await proxy.control.healthy()
    del ledger.renew_proxy
    assert (await asking).choices[0].message.content == "Hello"


async def test_a_proxy_without_a_lease_claims_nothing_and_control_clients_turn_to_another(start, until):
    cluster = await start(proxies=2)
    first, second = cluster.proxies
    await second.control.set_admission("demo", "train", admit_until=1, target_in_flight=8, samples_per_task=2)
    cluster.go_dumb(first)
    await until(lambda: not first.service.peers._leased.is_set(), "the lease has run out")
    assert (await first.control._send("POST", "/control/runs/demo/samples/claim", CLAIM, 5.0))[0] == 503
    async with ControlClient([first.url, second.url], CONTROL_KEY, deadline_s=10) as either:
        samples = await either.claim_samples("demo", "train", "w", 2)
    assert all(sample.base_url.startswith(second.url) for sample in samples)
    assert [sample.attempt for sample in samples] == [1, 1]


async def test_a_request_that_was_passed_on_once_is_not_passed_on_again(start):
    cluster = await start(proxies=2)
    first, second = cluster.proxies
    session = await first.control.create_session("demo")
    headers = {"Authorization": f"Bearer {session['api_key']}", "x-seamlessflow-relayed": "somebody"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{second.url}/v1/chat/completions", json=BODY) as answer,
    ):
        assert answer.status == 421
    assert not cluster.engine.requests


async def test_requests_to_an_owner_that_died_wait_for_the_end_of_its_lease(start):
    cluster = await start(Play(HELLO), proxies=2)
    first, second = cluster.proxies
    session = await second.control.create_session("demo")
    ledger = first.service.ledger
    dead = "an-id"
    ledger.register_proxy(dead, "http://127.0.0.1:9", 1.0)
    ledger.own_session(session["session"], dead, second.service.peers.id)
    second.service.sessions.lose(session["session"], StorageError("moved"))
    answer = await cluster.ask(first, session)
    assert answer.choices[0].message.content == "Hello"
    with contextlib.suppress(FencedError):
        ledger.own_session(session["session"], dead, None)
    assert ledger.session(session["session"]).proxy == first.service.peers.id
