"""The control port of a rank and its client, over real HTTP, with a trainer that does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from storage.errors import (
    AuthenticationFailed,
    ConfigError,
    DeadlineError,
    FencedError,
    GangLost,
    StorageError,
    TrainerError,
)
from workers.trainer.client import TrainerClient
from workers.trainer.launch import Launch
from workers.trainer.messages import UpdateMetrics, UpdateRequest, UpdateResult
from workers.trainer.progress import Progress
from workers.trainer.server import ControlServer

TOKEN = "a-token-of-some-length"
METRICS = UpdateMetrics.model_validate({name: 0 for name in UpdateMetrics.model_fields})


class IdleTrainer:
    """``gate`` holds updates until the test opens it, ``begun`` tells that one waits, ``error`` is what they raise."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.updates = 0

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.progress.phase = "ready"

    def park(self) -> None:
        self.progress.phase = "parked"

    def unpark(self) -> None:
        self.progress.phase = "ready"

    def update(self, request: UpdateRequest) -> UpdateResult:
        self.updates += 1
        self.progress.phase = "training"
        self.begun.set()
        assert self.gate.wait(30)
        self.progress.phase = "ready"
        if self.error is not None:
            raise self.error
        return UpdateResult(
            lineage=request.lineage,
            step=request.step,
            version=request.step + 1,
            checkpoint_path="/c",
            checkpoint_digest="0" * 64,
            weights_path="/w",
            weights_digest="0" * 64,
            metrics=METRICS,
        )


class Port:
    def __init__(self, server: ControlServer, trainer: IdleTrainer, client: TrainerClient) -> None:
        self.server = server
        self.trainer = trainer
        self.client = client


@pytest.fixture
async def port(make: Any) -> AsyncIterator[Port]:
    launch = Launch(
        spec=make.make_spec(Path("/model")),
        state=Path("/state"),
        rank=0,
        world_size=1,
        master_port=1,
        control_port=1,
        token=TOKEN,
        epoch=5,
    )
    trainer = IdleTrainer()
    server = ControlServer(launch, lambda: trainer)  # type: ignore[arg-type, return-value]  # what it uses of a Trainer
    runner = web.AppRunner(server.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with TrainerClient(f"http://127.0.0.1:{runner.addresses[0][1]}", TOKEN) as client:
        yield Port(server, trainer, client)
    trainer.gate.set()
    await runner.cleanup()


def _request(step: int = 0, *, epoch: int = 5, digest: str = "a") -> UpdateRequest:
    return UpdateRequest(lineage=0, step=step, manifest_key="key", manifest_digest=digest * 64, epoch=epoch)


async def _in_work(port: Port) -> None:
    assert await asyncio.to_thread(port.trainer.begun.wait, 10)


async def _arrived(port: Port, *, epoch: int) -> None:
    for _ in range(1000):
        if port.server.status().epoch == epoch:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"no request of epoch {epoch} arrived within 10 s")


async def test_an_update_returns_its_result(port: Port) -> None:
    await port.server.start_trainer()
    result = await port.client.update(_request(3), deadline_s=10)
    assert (result.step, result.version) == (3, 4)


async def test_status_answers_while_the_rank_trains(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.gate.clear()
    update = asyncio.create_task(port.client.update(_request(), deadline_s=30))
    await _in_work(port)
    assert (await port.client.status()).phase == "training"
    port.trainer.gate.set()
    await update


async def test_the_same_update_joins_the_running_one(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.gate.clear()
    first = asyncio.create_task(port.client.update(_request(epoch=5), deadline_s=30))
    await _in_work(port)
    second = asyncio.create_task(port.client.update(_request(epoch=6), deadline_s=30))
    await _arrived(port, epoch=6)
    port.trainer.gate.set()
    assert await first == await second
    assert port.trainer.updates == 1


async def test_an_update_outlives_the_caller_that_asked_for_it(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.gate.clear()
    with pytest.raises(DeadlineError, match=r"POST .*/update had no answer within 0\.2 s"):
        await port.client.update(_request(), deadline_s=0.2)
    again = asyncio.create_task(port.client.update(_request(epoch=6), deadline_s=30))
    await _arrived(port, epoch=6)
    port.trainer.gate.set()
    assert (await again).version == 1
    assert port.trainer.updates == 1


async def test_another_update_is_refused_while_one_runs(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.gate.clear()
    running = asyncio.create_task(port.client.update(_request(0), deadline_s=30))
    await _in_work(port)
    with pytest.raises(TrainerError, match=r"step 1 .* cannot start: update of step 0 of lineage 0 is in work"):
        await port.client.update(_request(1), deadline_s=10)
    port.trainer.gate.set()
    await running


async def test_a_rank_is_parked_and_unparked_by_the_newest_lease_only(port: Port) -> None:
    await port.server.start_trainer()
    assert (await port.client.park(5, deadline_s=10)).phase == "parked"
    assert (await port.client.unpark(6, deadline_s=10)).phase == "ready"
    with pytest.raises(FencedError, match=r"epoch 5 is out of date"):
        await port.client.park(5, deadline_s=10)
    assert (await port.client.status()).phase == "ready"


async def test_a_rank_is_not_parked_while_it_trains(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.gate.clear()
    running = asyncio.create_task(port.client.update(_request(), deadline_s=30))
    await _in_work(port)
    with pytest.raises(TrainerError, match=r"park cannot start: update of step 0 of lineage 0 is in work"):
        await port.client.park(5, deadline_s=10)
    port.trainer.gate.set()
    await running


async def test_an_old_epoch_is_refused_and_a_newer_one_is_remembered(port: Port) -> None:
    await port.server.start_trainer()
    with pytest.raises(FencedError, match=r"epoch 4 is out of date"):
        await port.client.update(_request(epoch=4), deadline_s=10)
    await port.client.update(_request(epoch=7), deadline_s=10)
    with pytest.raises(FencedError, match=r"has seen epoch 7"):
        await port.client.update(_request(1, epoch=6), deadline_s=10)
    assert port.trainer.updates == 1


async def test_an_epoch_that_is_out_of_date_answers_409(port: Port) -> None:
    await port.server.start_trainer()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{port.client.url}/update", json=_request(epoch=1).model_dump()) as response:
            assert response.status == 409
        async with session.post(f"{port.client.url}/update", json={"step": "one"}) as response:
            assert response.status == 400


async def test_a_wrong_token_is_refused_everywhere(port: Port) -> None:
    async with TrainerClient(port.client.url, "another-token-entirely") as stranger:
        for call in (stranger.status(), stranger.update(_request(), deadline_s=5), stranger.shutdown()):
            with pytest.raises(AuthenticationFailed, match=r"bearer token"):
                await call
    assert port.trainer.updates == 0


async def test_an_error_that_changed_nothing_leaves_the_trainer_usable(port: Port) -> None:
    await port.server.start_trainer()
    port.trainer.error = StorageError("the object store is away")
    with pytest.raises(StorageError, match=r"away"):
        await port.client.update(_request(), deadline_s=10)
    assert (await port.client.status()).last_error == "StorageError: the object store is away"
    port.trainer.error = None
    assert (await port.client.update(_request(), deadline_s=10)).version == 1
    assert (await port.client.status()).last_error is None


@pytest.mark.parametrize("error", [GangLost("rank 1 is gone"), RuntimeError("out of memory")])
async def test_a_lost_gang_stays_lost_until_it_is_restarted(port: Port, error: Exception) -> None:
    await port.server.start_trainer()
    port.trainer.error = error
    with pytest.raises(GangLost, match=str(error)):
        await port.client.update(_request(), deadline_s=10)
    port.trainer.error = None
    assert (await port.client.status()).phase == "failed"
    with pytest.raises(GangLost, match=r"must be restarted"):
        await port.client.update(_request(), deadline_s=10)


async def test_waiting_for_readiness_tells_why_the_start_failed(port: Port) -> None:
    port.trainer.error = ConfigError("model.path /nowhere: no config.json there")
    await port.server.start_trainer()
    with pytest.raises(TrainerError, match=r"no config\.json there"):
        await port.client.wait_ready(deadline_s=5)


async def test_waiting_for_readiness_has_a_deadline_that_tells_what_it_waited_for(port: Port) -> None:
    with pytest.raises(DeadlineError, match=r"not ready within 0\.3 s: phase is starting"):
        await port.client.wait_ready(deadline_s=0.3)
    with pytest.raises(TrainerError, match=r"still starting"):
        await port.client.update(_request(), deadline_s=5)


async def test_a_rank_that_does_not_listen_is_a_lost_gang(make: Any) -> None:
    async with TrainerClient(f"http://127.0.0.1:{make.free_port()}", TOKEN) as client:
        with pytest.raises(GangLost, match=r"cannot be reached"):
            await client.status()
        with pytest.raises(DeadlineError, match=r"cannot be reached"):
            await client.wait_ready(deadline_s=0.3)


async def test_shutdown_is_answered_before_the_rank_ends(port: Port) -> None:
    assert (await port.client.shutdown()).phase == "stopping"
    async with asyncio.timeout(5):
        await port.server.wait_stopped()
