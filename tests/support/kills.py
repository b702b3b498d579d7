"""Killing parts of a running cluster the hard way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from jobs import Job

from cli.processes import records_in
from cli.stack import StackStatus
from storage.ledger import Ledger


def service(job: Job, name: str) -> list[int]:
    """Pids of a service's process group: a wrapper and the server below it die together, as on a lost machine."""
    status = StackStatus.read(job.state)
    assert status is not None
    row = status.services[name]
    assert row.process is not None, f"{name} does not run"
    root = psutil.Process(row.process.pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def resident(file: Path) -> list[int]:
    """Pids that a residency file names and that are alive."""
    return [record.pid for record in records_in(file) if record.alive()]


def kill(pids: list[int]) -> None:
    """SIGKILL, all at once. Fails if there was nothing to kill: a kill that hits nothing shows nothing."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def steps_done(job: Job) -> int:
    """Committed policy updates."""
    if not (job.state.root / "ledger.db").exists():
        return 0
    ledger = Ledger(job.state.cluster().ledger_url)
    try:
        return len({row.step for row in ledger.steps(job.run)})
    finally:
        ledger.close()


def wait_until(condition: Callable[[], bool], what: str, limit_s: float, run: subprocess.Popen[bytes]) -> None:
    """Poll while ``run`` goes on; fails with ``what`` after ``limit_s`` seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert run.poll() is None, f"the command ended with exit code {run.returncode} before {what}"
        assert time.monotonic() < end, f"waited {limit_s:g} s for {what}"
        time.sleep(0.1)
