"""Weights change at every token boundary: each token's version is the one that the engine logged, in every case."""

from __future__ import annotations

import asyncio
from itertools import count

import aiohttp
import pytest
from interruptions import assert_as_logged, engine_log, sent
from spoken import CHAT, DIALECTS

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play
from workers.engines.scripted import ScriptedEngine

TEXT = "".join(chr(97 + index % 26) for index in range(199))
WHOLE = toy_ids(TEXT)
EXTRA = (5,)
"""Behind the end of turn, so that a fault can strike between that token and the engine's word that it ended there."""
PROMPT = 21


def rest(request, after=None, kind="stall"):
    """What is left of WHOLE after the request's tokens, in chunks that divide nothing evenly."""
    done = len(request.ids) - PROMPT
    fault = Fault(kind, after) if after is not None else None
    return Play((*WHOLE[done:], *(EXTRA if after == 200 else ())), chunk=7, fault=fault)


def first_cuts(cuts, kind="stall"):
    """Requests from the beginning are cut as `cuts` say, in order of arrival; later ones are not."""
    cut = iter(cuts)
    return lambda request: rest(request, next(cut, None) if len(request.ids) == PROMPT else None, kind)


async def ask_often(bench, times, *, stream=False):
    """The same request so many times at once, in one session; returns the choices that were recorded."""
    await bench.client()
    url = f"{bench.proxy.url}/s/{bench.session['session']}{CHAT.path}"
    key = {"Authorization": f"Bearer {bench.session['api_key']}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=key) as http:

        async def ask():
            async with http.post(url, json=CHAT.body(stream=stream)) as answer:
                assert (answer.status, CHAT.said(await answer.read())) == (200, TEXT)

        await asyncio.gather(*(ask() for _ in range(times)))
    return [turn.choices[0] for turn in (await bench.recorded()).turns]


@pytest.mark.parametrize(("stream", "cuts"), [(False, range(201)), (True, range(0, 201, 4))], ids=["whole", "stream"])
async def test_a_generation_cut_at_any_token_boundary_goes_on_under_the_next_weights(start_bench, until, stream, cuts):
    # The one that is cut in front of its first token waits until all 201 stand at their cuts.
    patient = {"hold_limit_s": 120.0}
    bench = await start_bench(scripted={"respond": first_cuts(cuts)}, agent={"max_turns": 201}, pipeline=patient)
    asking = asyncio.create_task(ask_often(bench, len(cuts), stream=stream))
    await until(
        lambda: sum(len(o.ids) for o in bench.engine.outputs.values()) == sum(cuts), "all stand at their cuts", 60
    )
    await until(lambda: len(bench.engine.requests) == len(cuts), "all have begun", 60)
    await bench.update_weights(1)
    seen = {}
    for choice in await asking:
        assert tuple(choice.recording.ids) == WHOLE
        assert_as_logged(choice, bench.engine)
        cut = choice.recording.versions.count(0)
        assert choice.recording.versions == [0] * cut + [1] * (200 - cut)
        seen[cut] = len([segment for segment in choice.recording.segments if segment.end > segment.start])
    # One that had its last token needs no second engine.
    assert seen == {cut: 2 if 0 < cut < 200 else 1 for cut in cuts}


class Counting(ScriptedEngine):
    """Notes what it is asked to abort."""

    def __init__(self, plays, **options):
        super().__init__(plays, **options)
        self.aborts = []

    async def abort(self, rid):
        self.aborts.append(rid)
        await super().abort(rid)


class Late(Counting):
    """Every request reaches it behind the abort of all."""

    async def abort(self, rid):
        if rid is None:
            self.aborts.append(rid)
        else:
            await super().abort(rid)


@pytest.mark.parametrize("engine_class", [Counting, Late])
async def test_a_node_that_is_taken_is_told_once_and_again_only_of_what_it_had_not_heard_of(
    start_bench, until, monkeypatch, engine_class
):
    # What an engine is told, not how fast: a machine that stands still for a second changes nothing here.
    monkeypatch.setattr("proxy.upstream.DRAIN_S", 25.0)
    monkeypatch.setattr("proxy.routes.DRAIN_S", 25.0)
    if engine_class is Counting:
        monkeypatch.setattr("proxy.upstream.MISSED_S", 20.0)
    cuts = range(10, 200, 10)
    bench = await start_bench(
        scripted={"respond": first_cuts(cuts)}, engine_class=engine_class, agent={"max_turns": len(cuts)}
    )
    asking = asyncio.create_task(ask_often(bench, len(cuts)))
    await until(lambda: sum(len(o.ids) for o in bench.engine.outputs.values()) == sum(cuts), "all stand at their cuts")
    begun = {request.rid for request in bench.engine.requests}
    await bench.route("closed")
    assert bench.engine.aborts[0] is None
    assert set(bench.engine.aborts[1:]) == (begun if engine_class is Late else set())
    await bench.route("open", 0)
    for choice in await asking:
        assert tuple(choice.recording.ids) == WHOLE
        assert_as_logged(choice, bench.engine)


@pytest.mark.parametrize("spoken", DIALECTS, ids=str)
async def test_one_generation_outlives_an_update_at_each_of_its_tokens(start_bench, until, spoken):
    # Each boundary alone is the scenario above; this one is about one generation of many segments.
    tokens = 50 if spoken is CHAT else 8
    whole = (*WHOLE[: tokens - 1], 2)
    served = count()

    def respond(request):
        return Play(whole[next(served) :], fault=Fault("stall", 1))

    bench = await start_bench(scripted={"respond": respond})
    await bench.client()
    url = f"{bench.proxy.url}/s/{bench.session['session']}{spoken.path}"
    key = {"Authorization": f"Bearer {bench.session['api_key']}"}
    async with aiohttp.ClientSession(headers=key) as http:
        asking = asyncio.create_task(http.post(url, json=spoken.body()))
        for version in range(1, tokens):
            await until(lambda n=version: len(bench.engine.requests) == n, f"segment {version} has begun")
            await until(lambda: bench.engine.outputs[bench.engine.requests[-1].rid].ids, "its token")
            await bench.update_weights(version)
        async with await asking as answer:
            assert spoken.said(await answer.read()) == TEXT[: tokens - 1]
    choice = (await bench.recorded()).turns[0].choices[0]
    assert tuple(choice.recording.ids) == whole
    assert choice.recording.versions == list(range(tokens))
    assert_as_logged(choice, bench.engine)
    requests = bench.engine.requests
    assert [request.salt.strip("\0") for request in requests] == [f"wv:{version}" for version in range(tokens)]
    assert [requests[0].max_new_tokens - request.max_new_tokens for request in requests] == list(range(tokens))


class Learning(ScriptedEngine):
    """Its weights change in place after every token; its final event knows them all."""

    async def _turn(self, output):
        await super()._turn(output)
        self.version = str(len(output.ids))


async def test_an_update_in_place_at_every_token_is_settled_by_the_engine_s_last_word(start_bench):
    bench = await start_bench(Play(WHOLE), engine_class=Learning)
    await bench.ask()
    choice = (await bench.recorded()).turns[0].choices[0]
    assert choice.recording.versions == list(range(200))
    assert_as_logged(choice, bench.engine)


@pytest.mark.parametrize("kind", ["drop", "no_final", "abort", "duplicate_last"])
async def test_without_that_word_no_token_ever_gets_a_version_that_is_not_its_own(start_bench, kind):
    cuts = range(0, 200, 5)
    bench = await start_bench(
        scripted={"respond": first_cuts(cuts, kind)}, engine_class=Learning, agent={"max_turns": 40}
    )
    unknown = 0
    for choice in await ask_often(bench, len(cuts)):
        ids, versions = engine_log(choice, bench.engine)
        assert tuple(choice.recording.ids) == tuple(ids) == WHOLE
        for recorded, logged in zip(choice.recording.versions, versions, strict=True):
            assert recorded in (logged, -1)
        unknown += choice.recording.versions.count(-1)
    # An abort comes with the last word; a connection that breaks does not.
    assert (unknown > 0) == (kind in ("drop", "no_final"))


async def test_an_update_while_the_route_is_held_and_the_engine_paused_cuts_nothing(start_bench, until):
    bench = await start_bench(Play(WHOLE, fault=Fault("stall", 80)))
    asking = asyncio.create_task(bench.ask())
    await until(sent(bench.engine, 80), "eighty tokens")
    await bench.route("held")
    await bench.engine.pause("in_place")
    await bench.engine.release()
    bench.engine.version = "1"
    await bench.engine.resume()
    await bench.route("open", 1)
    assert (await asking).choices[0].message.content == TEXT
    choice = (await bench.recorded()).turns[0].choices[0]
    assert len(choice.recording.segments) == 1
    assert choice.recording.versions == [0] * 80 + [1] * 120
    assert_as_logged(choice, bench.engine)


async def test_a_generation_may_go_back_and_forth_between_engines_of_different_versions(start_bench, until):
    served = count()

    def respond(request):
        return rest(request, 50 if next(served) < 3 else None)

    bench = await start_bench(scripted={"respond": respond})
    async with ScriptedEngine(respond=respond, vocab_size=259, weight_version="7") as other:
        engines = {"lease-a": (bench.engine, 0), "lease-b": (other, 7)}
        asking = asyncio.create_task(bench.ask())
        for lease, following in (("lease-a", "lease-b"), ("lease-b", "lease-a"), ("lease-a", "lease-b")):
            engine, version = engines[lease]
            await until(lambda e=engine: e._live, f"a segment on {lease}")
            await until(lambda e=engine: len(next(iter(e._live.values())).ids) == 50, "fifty tokens")
            await bench.route("closed", version, lease=lease, engine=engine)
            engine, version = engines[following]
            await bench.route("open", version, lease=following, engine=engine)
        assert (await asking).choices[0].message.content == TEXT
    choice = (await bench.recorded()).turns[0].choices[0]
    assert choice.recording.version_runs() == [[0, 50], [7, 50], [0, 50], [7, 50]]
    assert_as_logged(choice, bench.engine, other)
