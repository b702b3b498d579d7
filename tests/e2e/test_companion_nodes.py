"""A run whose reference or critic has a node of its own, on the whole stack; its ranks are killed in a pass."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jobs import Job, write_job
from kills import kill, resident, wait_until
from recomputed import on_one_rank
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from cli import stack
from storage.ledger import Checkpoint, Ledger
from storage.objects import ObjectStore
from workflows import calls
from workflows.messages import RunStatus, StepStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Answer = TypeVar("Answer", StepStatus, RunStatus)
STEPS = 3
LIMIT_S = 180.0
NODE = "node-c"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "reference": {"kl": "k3", "kl_coefficient": 0.2, "minibatches": 2, "reference_on": "own"},
    "critic": {"name": "ppo", "minibatches": 2, "critic_learning_rate": 1e-3, "critic_on": "own"},
}
FIGURE = {"reference": "reference_kl", "critic": "value_loss"}


async def asked(job: Job, workflow: str, kind: type[Answer]) -> Answer | None:
    """What a workflow's query ``status`` answers."""
    cluster = job.state.cluster()
    client = await Client.connect(cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter)
    try:
        found: Answer = await client.get_workflow_handle(workflow).query("status", result_type=kind)
    except RPCError:  # it is not there yet
        return None
    return found


def works(job: Job, role: str) -> bool:
    """Whether a step waits for the model: for its pass, or for the critic to learn if that had begun by the stop."""
    found = [asyncio.run(asked(job, calls.step_id(job.run, 0, step), StepStatus)) for step in range(STEPS)]
    return any(f"{role} on {NODE} to " in status.waiting_for for status in found if status is not None)


def ready(job: Job, role: str) -> list[int]:
    """Pids of the model's ranks, once they are ready."""
    file = job.state.node(NODE) / f"{role}-gang.json"
    if not file.exists():
        return []
    status = asyncio.run(asked(job, calls.run_id(job.run), RunStatus))
    return resident(file) if status is not None and [one.state for one in status.companions] == ["ready"] else []


@pytest.mark.parametrize("role", ALGORITHMS)
def test_ranks_that_are_killed_at_their_work_cost_nothing_and_change_no_weight(
    role: str, tmp_path: Path, tiny_model: Path
) -> None:
    nodes = [{"id": "node-a", "tags": ["rollout", "train"]}, {"id": "node-b", "tags": ["rollout"]}]
    nodes += [{"id": NODE, "tags": [role]}]
    changes = {"algorithm": ALGORITHMS[role], "pipeline": {"steps": STEPS}, "nodes": nodes}
    job = write_job(tmp_path, tiny_model, f"{role}-apart", **changes)
    try:
        shown, why, line = run_and_kill(job, role, tmp_path)
        steps, checkpoint, busy = books(job)
        again = on_one_rank(job, tmp_path / "again", {f"{role}_on": "trainer"})
        columns = ObjectStore.from_state(job.state).list(f"runs/{job.run}/columns/")
    finally:
        stack.down(job.state)

    assert (line["steps"], line["ledger_balanced"], line["tokens_lost"]) == (STEPS, True, 0)
    assert {node["node"]: node["activity"] for node in shown["nodes"]}[NODE] == role
    assert f"{NODE} can {role}" in why
    assert busy == {"train": "node-a", role: NODE}
    assert all(metrics["seconds_companions"] > 0 for metrics in steps)
    assert len(columns) == STEPS * (2 if role == "critic" else 1)

    figure = FIGURE[role]
    assert [getattr(one.metrics, figure) for one in again] == [metrics[figure] for metrics in steps]
    assert max(metrics[figure] for metrics in steps) > 0
    assert again[-1].weights_digest == checkpoint.weights_digest
    if role == "critic":
        assert checkpoint.critic_path is not None
        assert states(Path(checkpoint.critic_path)) == states(Path(again[-1].checkpoint_path))


def run_and_kill(job: Job, role: str, folder: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """What status says once it says that a pass is made, `why` after the kill, and the run's last line."""
    shown: dict[str, Any] = {}

    def told() -> bool:
        shown.update(
            json.loads(subprocess.check_output(job.command("status", "--state", str(job.state.root), "--json")))
        )
        return any(f"{role} on {NODE} to " in row["waiting_for"] for row in shown["runs"])

    with (folder / "demo.log").open("w") as output:
        run = subprocess.Popen(job.demo(), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: bool(ready(job, role)), f"the ranks of the {role}", LIMIT_S, run)
        victims = ready(job, role)
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)  # holds its work open
        wait_until(lambda: works(job, role), "the model's work on a batch", LIMIT_S, run)
        wait_until(told, "status to say what the step waits for", LIMIT_S, run)
        kill(victims)
        why = subprocess.check_output(job.command("why", NODE, "--state", str(job.state.root)), text=True)
        assert run.wait(timeout=300) == 0, (folder / "demo.log").read_text()[-4000:]
    finally:
        run.kill()
        run.wait()
    return shown, why, json.loads((folder / "demo.log").read_text().strip().splitlines()[-1])


def books(job: Job) -> tuple[list[dict[str, Any]], Checkpoint, dict[str, str]]:
    """Metrics of the steps, none of which was made twice; the last checkpoint; who did what but generate."""
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        steps, checkpoint = ledger.steps(job.run), ledger.latest_checkpoint(job.run)
        busy = {interval.kind: interval.node for interval in ledger.intervals(job.run) if interval.kind != "generate"}
    finally:
        ledger.close()
    assert [row.lineage for row in steps] == [0] * STEPS
    assert checkpoint is not None
    return [dict(row.metrics) for row in steps], checkpoint, busy


def states(checkpoint: Path) -> dict[str, bytes]:
    """The critic's weights and moments."""
    found = {path.name: path.read_bytes() for path in (checkpoint / "critic").glob("*")}
    assert found
    return found
