"""Weights by broadcast from a plain torch process, as the trainer sends them."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import EngineRejected
from storage.ports import free_port
from storage.weights import folder_digest
from tests.contract.engines.driver import PROMPT, Bench
from tests.contract.engines.models import logprobs
from tests.contract.engines.test_generation import NEAR, need
from workers.engines.base import PauseMode, Transfer
from workers.node_agent.sender import Sender


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_broadcast_brings_the_weights_that_the_files_hold(bench: Bench, mode: PauseMode) -> None:
    need(bench, "collective")
    need(bench, f"pause_{mode}")
    paths = (bench.checkpoints.first, bench.checkpoints.second)
    sender = Sender()
    for version in (1, 2, 3):
        generation = await bench.running()
        await bench.engine.pause(mode)
        async with sender.sending(str(paths[version % 2])) as transfer:
            loaded = await bench.engine.load_weights(str(paths[version % 2]), version, transfer)
        await bench.engine.resume()
        bench.version = version
        assert (loaded.version, loaded.checksum) == (version, folder_digest(paths[version % 2]))
        await generation.reach(len(generation.ids) + 20)
        await bench.engine.abort(generation.rid)
        assert set((await generation.end()).versions) == {version - 1, version}
        fresh = await bench.generate(tokens=30)
        assert fresh.versions == [version] * 30
        assert fresh.logprobs == pytest.approx(logprobs(paths[version % 2], PROMPT, fresh.ids), abs=NEAR)
    await sender.close()


async def test_a_sender_that_is_not_there_is_told_before_the_engine_waits_for_it(bench: Bench) -> None:
    need(bench, "collective")
    nobody = Transfer("nobody", "127.0.0.1", free_port(), rank=1, world_size=2)
    hasty = bench.rig.connect(bench.process.url, deadline_s=5.0)
    with pytest.raises(EngineRejected, match="sender"):
        await hasty.load_weights(str(bench.checkpoints.second), 1, nobody)
    await hasty.close()
    assert (await bench.generate()).versions == [0] * 8


async def test_a_checkpoint_that_does_not_fit_is_not_received(bench: Bench, tmp_path: Path) -> None:
    need(bench, "collective")
    nobody = Transfer("nobody", "127.0.0.1", free_port(), rank=1, world_size=2)
    with pytest.raises(EngineRejected, match=str(tmp_path)):
        await bench.engine.load_weights(str(tmp_path), 1, nobody)
    assert (await bench.generate()).versions == [0] * 8
