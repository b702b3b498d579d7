"""Trains the batches that a run has trained once more, on one rank that holds every model itself."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from pathlib import Path

from jobs import Job

from storage.ledger import Ledger
from storage.ports import free_port
from workers.cluster import StateFolder
from workers.node_agent.trainer import rank_command
from workers.trainer.client import TrainerClient
from workers.trainer.launch import Launch, Residency
from workers.trainer.messages import UpdateRequest, UpdateResult
from workflows.spec import RunSpec

LIMIT_S = 120.0
RESIDENCY = "rank.json"


def on_one_rank(job: Job, folder: Path, placed: dict[str, str]) -> list[UpdateResult]:
    """Each step of a run whose cluster still stands. ``placed``: the algorithm's keys that say where models are."""
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        spec = RunSpec.model_validate(ledger.run_info(job.run).spec)
        requests = []
        for row in sorted(ledger.steps(job.run), key=lambda row: row.step):
            ref = ledger.manifest(job.run, row.lineage, row.step)
            assert ref is not None
            asked = UpdateRequest(lineage=0, step=row.step, manifest_key=ref.key, manifest_digest=ref.digest, epoch=1)
            requests.append(asked)
    finally:
        ledger.close()
    trains = tuple(node for node in spec.nodes if "train" in node.tags)
    algorithm = spec.algorithm.model_copy(update=placed)
    spec = spec.model_copy(update={"algorithm": algorithm, "nodes": trains})
    rank = _start(spec, job, folder)
    try:
        residency = Residency.model_validate_json((folder / RESIDENCY).read_text())
        return asyncio.run(_updates(residency, requests))
    finally:
        rank.kill()
        rank.wait()


def _start(spec: RunSpec, job: Job, folder: Path) -> subprocess.Popen[bytes]:
    StateFolder(folder).write(job.state.cluster(), job.state.secrets())
    launch = Launch(
        spec=spec,
        state=folder,
        rank=0,
        world_size=1,
        master_port=free_port(),
        token=secrets.token_hex(16),
        epoch=1,
        residency=folder / RESIDENCY,
        threads=spec.nodes[0].threads,
    )
    launch.write(folder / "launch.json")
    with (folder / "rank.log").open("w") as log:
        rank = subprocess.Popen(rank_command(folder / "launch.json"), stdout=log, stderr=log)
    end = time.monotonic() + LIMIT_S
    while not (folder / RESIDENCY).exists():
        if time.monotonic() > end:
            rank.kill()
            raise AssertionError((folder / "rank.log").read_text())
        time.sleep(0.1)
    return rank


async def _updates(residency: Residency, requests: list[UpdateRequest]) -> list[UpdateResult]:
    async with TrainerClient.of(residency) as client:
        await client.wait_ready(deadline_s=LIMIT_S)
        return [await client.update(request, deadline_s=LIMIT_S) for request in requests]
