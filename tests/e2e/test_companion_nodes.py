"""A run whose reference has a node of its own, on the whole stack; its ranks are killed while they compute a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from jobs import Job, write_job
from kills import kill, resident, wait_until
from recomputed import on_one_rank
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from cli import stack
from storage.ledger import Ledger
from storage.objects import ObjectStore
from workflows import calls
from workflows.messages import RunStatus, StepStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Answer = TypeVar("Answer", StepStatus, RunStatus)
STEPS = 3
LIMIT_S = 180.0
PLACED = {"reference": {"reference_on": "own"}}
NODES = [
    {"id": "node-a", "tags": ["rollout", "train"]},
    {"id": "node-b", "tags": ["rollout"]},
    {"id": "node-r", "tags": ["reference"]},
]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Iterator[Job]:
    algorithm = {"kl": "k3", "kl_coefficient": 0.2, "minibatches": 2, **PLACED["reference"]}
    job = write_job(
        tmp_path, tiny_model, "reference-apart", algorithm=algorithm, pipeline={"steps": STEPS}, nodes=NODES
    )
    yield job
    stack.down(job.state)


async def asked(job: Job, workflow: str, kind: type[Answer]) -> Answer | None:
    """What a workflow's query ``status`` answers."""
    cluster = job.state.cluster()
    client = await Client.connect(cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter)
    try:
        found: Answer = await client.get_workflow_handle(workflow).query("status", result_type=kind)
    except RPCError:  # it is not there yet
        return None
    return found


def computes(job: Job, step: int) -> bool:
    """Whether a step waits for its reference."""
    status = asyncio.run(asked(job, calls.step_id(job.run, 0, step), StepStatus))
    return status is not None and "reference on node-r to compute" in status.waiting_for


def ready(job: Job) -> list[int]:
    """Pids of the reference's ranks, once they are ready."""
    if not (job.state.node("node-r") / "reference-gang.json").exists():
        return []
    status = asyncio.run(asked(job, calls.run_id(job.run), RunStatus))
    ready = status is not None and [one.state for one in status.companions] == ["ready"]
    return resident(job.state.node("node-r") / "reference-gang.json") if ready else []


def test_a_reference_that_is_killed_in_its_pass_costs_nothing_and_changes_no_weight(job: Job, tmp_path: Path) -> None:
    with (tmp_path / "demo.log").open("w") as output:
        run = subprocess.Popen(job.demo(), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: bool(ready(job)), "the reference's ranks", LIMIT_S, run)
        victims = ready(job)
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)  # holds the pass open
        wait_until(lambda: computes(job, 0), "the pass of step 0", LIMIT_S, run)
        shown = json.loads(subprocess.check_output(job.command("status", "--state", str(job.state.root), "--json")))
        kill(victims)
        why = subprocess.check_output(job.command("why", "node-r", "--state", str(job.state.root)), text=True)
        assert run.wait(timeout=300) == 0, (tmp_path / "demo.log").read_text()[-4000:]
    finally:
        run.kill()
        run.wait()
    line = json.loads((tmp_path / "demo.log").read_text().strip().splitlines()[-1])
    assert (line["steps"], line["ledger_balanced"], line["tokens_lost"]) == (STEPS, True, 0)
    activities = {node["node"]: node["activity"] for node in shown["nodes"]}
    assert activities["node-r"] == "reference"
    assert "node-r can reference" in why

    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        steps, checkpoint = ledger.steps(job.run), ledger.latest_checkpoint(job.run)
        nodes = {interval.kind: interval.node for interval in ledger.intervals(job.run) if interval.kind != "generate"}
    finally:
        ledger.close()
    assert [row.lineage for row in steps] == [0] * STEPS, "no step was trained twice"
    assert nodes == {"train": "node-a", "reference": "node-r"}
    assert all(row.metrics["seconds_companions"] > 0 for row in steps)
    assert max(row.metrics["reference_kl"] for row in steps) > 0

    columns = [key for key in ObjectStore.from_state(job.state).list(f"runs/{job.run}/columns/")]
    assert len(columns) == STEPS
    again = on_one_rank(job, tmp_path / "again", {"reference_on": "trainer"})
    assert checkpoint is not None
    assert again[-1].weights_digest == checkpoint.weights_digest
    assert [one.metrics.reference_kl for one in again] == [row.metrics["reference_kl"] for row in steps]
