"""A test session that is killed leaves no process behind, not even one that was started to outlive its starter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

SESSION = """
import subprocess, sys, time
import sweeper
sweeper.start()
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_session_had_detached_ends_with_it() -> None:
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent / "support"
    )
    assert session.stdout is not None
    detached = psutil.Process(int(session.stdout.readline()))
    assert runs(detached)
    session.kill()
    session.communicate()
    end = time.monotonic() + 60
    while runs(detached):
        assert time.monotonic() < end, "it outlived its session"
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
