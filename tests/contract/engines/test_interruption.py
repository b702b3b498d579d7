"""Abort, pause and clients that go away."""

from __future__ import annotations

import uuid

import pytest

from storage.errors import EngineRejected
from tests.contract.engines.driver import LONG, Bench
from tests.contract.engines.test_generation import need
from workers.engines.base import PauseMode, Sampling


async def test_an_aborted_request_gives_what_it_has_and_leaves_others_alone(bench: Bench) -> None:
    first, second = await bench.running(), await bench.running(tokens=150)
    await first.reach(10)
    await bench.engine.abort(first.rid)
    await first.end()
    assert first.finish == "abort"
    assert 10 <= len(first.ids) == len(first.logprobs) < LONG
    assert len(first.versions) == len(first.ids)
    assert (await second.end()).finish == "length"


async def test_an_id_that_begins_another_aborts_only_its_own_request(bench: Bench) -> None:
    stem = uuid.uuid4().hex[:30]
    first, second = await bench.running(rid=f"{stem}10"), await bench.running(tokens=150, rid=f"{stem}11")
    await bench.engine.abort(first.rid)
    assert (await first.end()).finish == "abort"
    assert (await second.end()).finish == "length"


async def test_a_request_that_waits_is_aborted_too(bench: Bench) -> None:
    need(bench, "queue")
    running = [await bench.running() for _ in range(16)]
    queued = bench.start()
    await bench.until_live(17)
    await bench.engine.abort(queued.rid)
    assert (await queued.end()).finish == "abort"
    assert not queued.ids
    await bench.engine.abort(running[0].rid)
    assert len((await bench.generate()).ids) == 8


async def test_aborting_all_ends_all_and_the_engine_serves_on(bench: Bench) -> None:
    generations = [await bench.running() for _ in range(3)]
    await bench.engine.abort(None)
    assert [(await generation.end()).finish for generation in generations] == ["abort"] * 3
    assert len((await bench.generate()).ids) == 8


async def test_aborting_an_unknown_request_is_harmless(bench: Bench) -> None:
    await bench.engine.abort(uuid.uuid4().hex)
    assert len((await bench.generate()).ids) == 8


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_stops_generation_and_loses_nothing(bench: Bench, mode: PauseMode) -> None:
    if not bench.can(f"pause_{mode}"):
        with pytest.raises(EngineRejected, match=mode):
            await bench.engine.pause(mode)
        return
    undisturbed = await bench.generate(tokens=600, temperature=0.0)
    generation = await bench.running(tokens=600, temperature=0.0)
    await bench.engine.pause(mode)
    await bench.engine.pause(mode)
    assert await bench.engine.ready()
    late = bench.start()
    await bench.calm()
    stopped_at = len(generation.ids)
    await bench.calm()
    assert len(generation.ids) == stopped_at < 600
    assert not late.chunks
    await bench.engine.resume()
    await bench.engine.resume()
    assert (await generation.end()).ids == undisturbed.ids
    assert generation.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    assert len((await late.end()).ids) == 8


@pytest.mark.parametrize("before", [None, "in_place", "retract"])
async def test_a_pause_with_abort_ends_running_requests_and_holds_new_ones(
    bench: Bench, before: PauseMode | None
) -> None:
    if before is not None:
        need(bench, f"pause_{before}")
    generation = await bench.running()
    await generation.reach(5)
    if before is not None:
        await bench.engine.pause(before)
    await bench.engine.pause("abort")
    assert (await generation.end()).finish == "abort"
    assert 5 <= len(generation.ids) == len(generation.versions) < LONG
    late = bench.start()
    await bench.calm()
    assert not late.chunks
    await bench.engine.resume()
    assert len((await late.end()).ids) == 8


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_request_can_be_aborted_while_the_engine_is_paused(bench: Bench, mode: PauseMode) -> None:
    need(bench, f"pause_{mode}")
    generation = await bench.running()
    await generation.reach(5)
    await bench.engine.pause(mode)
    await bench.engine.abort(generation.rid)
    if mode == "in_place" and not bench.can("abort_in_place"):
        await bench.engine.resume()
    assert (await generation.end()).finish == "abort"
    assert 5 <= len(generation.ids) == len(generation.logprobs) < LONG
    await bench.engine.resume()


async def test_a_client_that_goes_away_aborts_its_request(bench: Bench) -> None:
    stream = bench.engine.generate(
        [1, 2, 3], Sampling(max_new_tokens=LONG), request_id=uuid.uuid4().hex, salt=bench.salt
    )
    await anext(stream)
    await stream.aclose()
    await bench.idle()
    assert len((await bench.generate()).ids) == 8


async def test_load_counts_requests_that_run_and_wait(bench: Bench) -> None:
    generations = [await bench.running() for _ in range(2)]
    await bench.until_live(2)
    await bench.engine.abort(None)
    for generation in generations:
        await generation.end()
    await bench.idle()


async def test_memory_is_released_when_idle_only_and_requests_wait_for_it(bench: Bench) -> None:
    if not bench.can("release_memory"):
        with pytest.raises(EngineRejected, match="memory"):
            await bench.engine.release_memory()
        assert len((await bench.generate()).ids) == 8
        return
    generation = await bench.running()
    with pytest.raises(EngineRejected):
        await bench.engine.release_memory()
    await bench.engine.abort(None)
    await generation.end()
    await bench.engine.release_memory()
    assert await bench.engine.ready()
    late = bench.start()
    await bench.calm()
    assert not late.chunks
    await bench.engine.resume_memory()
    assert len((await late.end()).ids) == 8
