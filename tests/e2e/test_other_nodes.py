"""A run that stopped goes on with other nodes, its gang of another size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import Job, write_job
from kills import resident, steps_done, wait_until
from temporalio.client import Client

from cli import stack
from cli.runs import run_id
from storage.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 8


def ranks(job: Job) -> set[str]:
    """Nodes on which trainer ranks live."""
    return {file.parent.name for file in job.state.root.glob("nodes/*/gang.json") if resident(file)}


def demo(job: Job, output: Path) -> subprocess.Popen[bytes]:
    with output.open("w") as file:
        return subprocess.Popen(job.demo(), stdout=file, stderr=subprocess.STDOUT)


def edit_nodes(job: Job, tags: dict[str, list[str]]) -> None:
    data: dict[str, Any] = yaml.safe_load(job.file.read_text())
    data["nodes"] = [{"id": name, "tags": tags[name]} for name in tags]
    job.file.write_text(yaml.safe_dump(data))


async def test_a_run_trained_by_two_ranks_is_terminated_and_goes_on_with_one(tmp_path: Path, tiny_model: Path) -> None:
    job = write_job(tmp_path, tiny_model, "resized", pipeline={"steps": STEPS})
    edit_nodes(job, {"node-a": ["rollout", "train"], "node-b": ["rollout", "train"]})
    output = tmp_path / "demo.log"
    try:
        first = demo(job, output)
        wait_until(lambda: steps_done(job) >= 2, "step 2", 240.0, first)
        assert ranks(job) == {"node-a", "node-b"}

        client = await Client.connect(job.state.cluster().temporal, namespace=job.state.cluster().namespace)
        await client.get_workflow_handle(run_id(job.run)).terminate("a smaller gang")
        assert first.wait(timeout=60) == 1, output.read_text()[-4000:]
        stack.down(job.state)
        edit_nodes(job, {"node-a": ["rollout", "train"], "node-b": ["rollout"]})
        before = steps_done(job)

        second = demo(job, output)
        wait_until(lambda: steps_done(job) > before, f"step {before + 1}", 240.0, second)
        assert ranks(job) == {"node-a"}
        assert second.wait(timeout=240) == 0, output.read_text()[-4000:]
        line = json.loads(output.read_text().strip().splitlines()[-1])
        assert line["steps"] == STEPS
        assert line["ledger_balanced"] is True
        assert line["tokens_lost"] == 0
        ledger = Ledger(job.state.cluster().ledger_url)
        assert sorted(row.step for row in ledger.steps(job.run)) == list(range(STEPS)), "each step is trained once"
        ledger.close()
    finally:
        stack.down(job.state)
