"""SIGKILL of every process of a running job: the run completes, the books balance, no acknowledged token is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job, write_job
from kills import kill, resident, service, steps_done, wait_until

from cli import stack
from cli.stack import StackStatus

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

STEP_LIMIT_S = 180.0
VICTIMS: dict[str, Callable[[Job], list[int]]] = {
    "proxy": lambda job: service(job, "proxy"),
    "engine": lambda job: resident(job.state.node("node-b") / "engine.json"),
    "trainer rank": lambda job: resident(job.state.node("node-a") / "gang.json"),
    "node agent": lambda job: service(job, "node-node-a")[:1],
    "control worker": lambda job: service(job, "control"),
    "temporal server": lambda job: service(job, "temporal"),
    "object store": lambda job: service(job, "s3"),
    "agent worker": lambda job: service(job, "agents"),
    "reward worker": lambda job: service(job, "rewards"),
}


def wait_for_step(job: Job, number: int, run: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: steps_done(job) >= number, f"step {number}", STEP_LIMIT_S, run)


def balanced_to_the_end(job: Job, line: dict[str, object]) -> None:
    books = job.books()
    assert books.balanced
    assert sum(books.pending.values()) == 0
    assert set(books.failed) <= {"infra"}, "an infrastructure failure never counts against the agent or the reward"
    assert line["ledger_balanced"] is True
    assert line["tokens_lost"] == 0


def test_each_process_is_killed_once_in_a_run_which_completes_with_balanced_books(
    tmp_path: Path, tiny_model: Path
) -> None:
    job = write_job(tmp_path, tiny_model, "kills", pipeline={"steps": len(VICTIMS) + 1})
    with (tmp_path / "demo.log").open("w") as output:
        run = subprocess.Popen(job.demo(), stdout=output, stderr=subprocess.STDOUT)
    try:
        for number, (name, pids) in enumerate(VICTIMS.items(), start=1):
            wait_for_step(job, number, run)
            kill(pids(job))
            print(f"killed {name} after step {number}")
        assert run.wait(timeout=300) == 0, (tmp_path / "demo.log").read_text()[-4000:]
        line = json.loads((tmp_path / "demo.log").read_text().strip().splitlines()[-1])
        assert line["steps"] == len(VICTIMS) + 1
        balanced_to_the_end(job, line)
        status = StackStatus.read(job.state)
        assert status is not None
        restarted = {name for name, row in status.services.items() if row.restarts}
        assert restarted == {"proxy", "node-node-a", "control", "temporal", "s3", "agents", "rewards"}
    finally:
        run.kill()
        stack.down(job.state)


def test_killing_the_whole_tree_and_running_the_command_again_goes_on_from_where_it_was(
    tmp_path: Path, tiny_model: Path
) -> None:
    job = write_job(tmp_path, tiny_model, "again", pipeline={"steps": 4})
    try:
        run = subprocess.Popen(job.demo(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_step(job, 2, run)
        kill(everything(job, run.pid))
        run.wait()
        before = steps_done(job)
        done = subprocess.run(job.demo(), capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        line = json.loads(done.stdout.strip().splitlines()[-1])
        assert "found, and goes on" in done.stdout + done.stderr
        assert before >= 2
        assert line["steps"] == 4
        balanced_to_the_end(job, line)
    finally:
        stack.down(job.state)


def everything(job: Job, demo: int) -> list[int]:
    """Every process of the cluster: the command, the supervisor, its services, engines and ranks."""
    status = StackStatus.read(job.state)
    assert status is not None
    services = [pid for name, row in status.services.items() if row.process for pid in service(job, name)]
    files = [*job.state.root.glob("nodes/*/engine.json"), *job.state.root.glob("nodes/*/gang.json")]
    return [demo, status.supervisor.pid, *services, *(pid for file in files for pid in resident(file))]
