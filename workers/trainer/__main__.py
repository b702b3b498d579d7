"""One trainer rank: ``python -m workers.trainer --launch FILE``. Logs to stdout; ends on SIGTERM or ``/shutdown``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from storage.errors import ConfigError
from storage.processes import started_at
from workers.cluster import StateFolder
from workers.trainer.launch import Launch, Residency
from workers.trainer.server import ControlServer

if TYPE_CHECKING:
    from workers.trainer.rank import Rank  # imports torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.trainer", description="One rank of a trainer gang.")
    parser.add_argument("--launch", type=Path, required=True, help="launch file, JSON (workers.trainer.launch.Launch)")
    path = parser.parse_args().launch
    try:
        launch = Launch.read(path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format=f"%(asctime)s rank {launch.rank} %(levelname)s %(message)s"
    )
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    # Read by the OpenMP runtime when torch is imported, which happens later and in another thread.
    os.environ["OMP_NUM_THREADS"] = str(launch.threads)
    asyncio.run(_serve(launch, path))
    return 0


async def _serve(launch: Launch, path: Path) -> None:
    server = ControlServer(launch, lambda: _make_rank(launch))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, launch.control_host, launch.control_port)
    await site.start()
    port = runner.addresses[0][1]
    if launch.residency is not None:
        _residency(launch, path, port).write(launch.residency)
    logging.info("rank %d of %d listens on %s:%d", launch.rank, launch.world_size, launch.control_host, port)
    start = asyncio.create_task(server.start_trainer())
    await server.wait_stopped()
    await asyncio.sleep(0.05)  # lets the answer to /shutdown leave
    await runner.cleanup()
    if not start.done():
        logging.info("stopped while starting")
    # A collective operation that waits for another rank cannot be interrupted, and joining its thread would wait for
    # it: end the process. What was committed is on disk.
    sys.stdout.flush()
    os._exit(0)


def _residency(launch: Launch, path: Path, port: int) -> Residency:
    return Residency(
        pid=os.getpid(),
        start_time=started_at(os.getpid()),
        host=launch.control_host,
        port=port,
        token=launch.token,
        epoch=launch.epoch,
        rank=launch.rank,
        world_size=launch.world_size,
        run=launch.spec.run,
        launch=str(path),
    )


def _make_rank(launch: Launch) -> Rank:
    """Imports torch, transformers and deepspeed: seconds, so only once the control port listens."""
    import torch

    torch.set_num_threads(launch.threads)

    from storage.objects import ObjectStore
    from storage.weights import WeightsStore
    from workers.trainer.batch import Batch, read_batch
    from workers.trainer.checkpoint import CheckpointFolder
    from workers.trainer.critic_trainer import CriticTrainer
    from workers.trainer.deepspeed_backend import DeepSpeedBackend
    from workers.trainer.messages import UpdateRequest
    from workers.trainer.rank import Rank
    from workers.trainer.trainer import Trainer

    state = StateFolder(launch.state)
    store = ObjectStore.from_state(state)
    backend = DeepSpeedBackend(launch)

    def read(
        request: UpdateRequest, without: frozenset[str] = frozenset(), dropped: frozenset[str] = frozenset()
    ) -> Batch:
        return read_batch(store, request, launch.spec.run, launch.spec.algorithm, without, dropped)

    if launch.role == "reference":
        return Rank(launch, backend, read, store)
    checkpoints, weights = state.checkpoints(launch.spec.run), WeightsStore(state.weights(launch.spec.run))
    if launch.role == "critic":
        return CriticTrainer(launch, backend, read, CheckpointFolder(checkpoints / "critic"), weights, store)
    return Trainer(launch, backend, read, CheckpointFolder(checkpoints), weights, store)


if __name__ == "__main__":
    sys.exit(main())
