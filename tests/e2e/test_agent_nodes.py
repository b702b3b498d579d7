"""A run whose agents and rewards are the work of a node with these tags, on the whole stack; people re-tag it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job, write_job
from kills import steps_done, wait_until

from cli import stack
from cli.stack import StackStatus
from storage.ledger import TRAIN, Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 20
LIMIT_S = 240.0
NODES = [
    {"id": "node-a", "tags": ["rollout", "train"]},
    {"id": "node-b", "tags": ["rollout"]},
    {"id": "node-c", "tags": ["agent", "reward"]},
]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Iterator[Job]:
    job = write_job(tmp_path, tiny_model, "agents-apart", pipeline={"steps": STEPS}, nodes=NODES)
    yield job
    stack.down(job.state)


def asked(job: Job, *arguments: str) -> str:
    return subprocess.check_output(job.command(*arguments, "--state", str(job.state.root)), text=True, timeout=60)


def listed(job: Job, activity: str) -> bool:
    """Whether the node is listed as doing this now."""
    return "node-c" in asked(job, "node", "list", "--activity", activity)


def scored(job: Job) -> int:
    """Samples that have a reward."""
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        return sum(sample.reward is not None for sample in ledger.samples(job.run, TRAIN))
    finally:
        ledger.close()


def test_a_node_loses_the_tag_reward_and_gets_it_back_and_the_run_waits_and_goes_on(job: Job, tmp_path: Path) -> None:
    with (tmp_path / "demo.log").open("w") as output:
        run = subprocess.Popen(job.demo(), stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: steps_done(job) >= 1, "step 1", LIMIT_S, run)
        asked(job, "node", "tag", "node-c", "agent")
        wait_until(lambda: not listed(job, "reward"), "the end of the rewards", LIMIT_S, run)
        before, done = scored(job), steps_done(job)
        assert listed(job, "agent")
        assert scored(job) == before, "nobody scores"

        asked(job, "node", "tag", "node-c", "agent,reward", "--why", "it has room again")
        wait_until(lambda: listed(job, "reward") and scored(job) > before, "rewards", LIMIT_S, run)
        (row,) = (n for n in json.loads(asked(job, "status", "--json"))["nodes"] if n["node"] == "node-c")
        assert (row["activity"], row["shares"], row["does"]) == ("free", ["agent", "reward"], "agent, reward")
        assert "Beside that it scores for every run that needs it" in asked(job, "why", "node-c")
        assert done < STEPS
        status = StackStatus.read(job.state)
        assert status is not None
        assert not {"agents", "rewards"} & status.services.keys()
        assert run.wait(timeout=300) == 0, (tmp_path / "demo.log").read_text()[-4000:]
    finally:
        run.kill()
        run.wait()
    line = json.loads((tmp_path / "demo.log").read_text().strip().splitlines()[-1])
    assert (line["steps"], line["ledger_balanced"], line["tokens_lost"]) == (STEPS, True, 0)
    books = job.books()
    assert books.balanced
    assert set(books.failed) <= {"infra"}
