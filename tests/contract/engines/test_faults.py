"""Slow and dead servers: every call has a deadline, and what was delivered stays delivered."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from storage.errors import EngineUnavailable
from tests.contract.engines.driver import PROMPT, Bench
from workers.engines.base import Sampling

SHORT_S = 1.0
GRACE_S = 20.0
"""Beyond a deadline, on a machine that has other things to do."""


async def test_a_server_that_hangs_is_given_up_at_the_deadline_and_serves_on_when_it_wakes(bench: Bench) -> None:
    impatient = bench.rig.connect(bench.process.url, deadline_s=SHORT_S, load_deadline_s=SHORT_S, stall_s=SHORT_S)
    await impatient.info()
    generation = await bench.running()
    bench.process.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        for call in (impatient.info(), impatient.stats(), impatient.pause("retract"), impatient.abort(None)):
            with pytest.raises(EngineUnavailable):
                await call
        assert not await impatient.ready()
        with pytest.raises(EngineUnavailable):
            async for _ in impatient.generate(PROMPT, Sampling(max_new_tokens=8), request_id="h" * 32, salt="h"):
                pass
        assert time.monotonic() - begun < 6 * SHORT_S + GRACE_S
    finally:
        bench.process.signal(signal.SIGCONT)
        await impatient.close()
    await bench.engine.resume()
    assert await bench.engine.ready()
    await generation.end()
    assert generation.finish in ("length", "abort")
    assert len((await bench.generate()).ids) == 8


async def test_a_server_that_dies_ends_its_streams_and_keeps_what_they_delivered(bench: Bench) -> None:
    generations = [await bench.running() for _ in range(3)]
    bench.process.signal(signal.SIGKILL)
    for generation in generations:
        with pytest.raises(EngineUnavailable):
            await generation.end()
        assert generation.ids
        assert len(generation.ids) == len(generation.logprobs)
        assert generation.finish is None
    assert not await bench.engine.ready()
    for call in (bench.engine.info(), bench.engine.stats(), bench.engine.pause("in_place"), bench.engine.resume()):
        with pytest.raises(EngineUnavailable):
            await call
    with pytest.raises(EngineUnavailable):
        await bench.generate()
    with pytest.raises(EngineUnavailable):
        await bench.engine.load_weights(str(bench.checkpoints.second), 1)


async def test_a_call_on_a_port_where_nothing_listens_fails_at_once(bench: Bench) -> None:
    nowhere = bench.rig.connect("http://127.0.0.1:9", deadline_s=SHORT_S)
    async with asyncio.timeout(SHORT_S + GRACE_S):
        assert not await nowhere.ready()
        with pytest.raises(EngineUnavailable):
            await nowhere.info()
    await nowhere.close()
