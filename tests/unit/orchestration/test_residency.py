"""Processes that a node started, and what those started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from workers.node_agent.spawn import spawn
from workers.residency import ProcessRef

LEADER = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
async def server() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process in a session of its own, and the pid of the worker it has started, which SIGTERM does not end."""
    leader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADER, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    yield leader, int(await leader.stdout.readline())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    await leader.wait()


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_server_is_ended_with_the_workers_it_started(
    server: tuple[asyncio.subprocess.Process, int],
) -> None:
    leader, worker = server
    await ProcessRef.of(leader.pid).end()
    await leader.wait()
    assert not runs(worker)


async def test_workers_that_outlive_their_server_are_ended_too(
    server: tuple[asyncio.subprocess.Process, int],
) -> None:
    leader, worker = server
    reference = ProcessRef.of(leader.pid)
    leader.kill()
    await leader.wait()
    assert runs(worker)
    await reference.end()
    assert not runs(worker)


async def test_a_group_whose_number_is_a_living_stranger_is_left_alone(
    server: tuple[asyncio.subprocess.Process, int],
) -> None:
    leader, worker = server
    await ProcessRef(pid=leader.pid, start_time=1.0).end()
    assert runs(leader.pid)
    assert runs(worker)


def test_a_process_stays_the_same_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ProcessRef.of(os.getpid())
    # What psutil says is reckoned back from now: it changes with the clock, and while a virtual machine sleeps.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1e9)
    assert known.alive()


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    known = ProcessRef.of(os.getpid())
    assert not known.model_copy(update={"start_time": known.start_time - 0.01}).alive()


def test_processes_that_ended_leave_no_zombies_when_the_next_is_started(tmp_path: Path) -> None:
    def start(program: str) -> ProcessRef:
        return spawn([program, "0"], log=tmp_path / "log", cores=(), threads=1, environment={})

    ended = start("sleep")
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    start("sleep")
    assert not psutil.pid_exists(ended.pid)
