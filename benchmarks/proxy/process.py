"""Processes under measurement: started, asked for their CPU time and memory, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.proxy.client import call

_START_S = 60.0
_STOP_S = 15.0
_SETTLED_S = 0.001
"""A process is at rest when it used less CPU than this in a twentieth of a second."""


class Process:
    """One command and its children. ``log`` gets what it prints; it is shown if the command dies."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._tree = [psutil.Process(self._popen.pid)]

    async def answers(self, url: str, path: str, body: dict[str, Any] | None = None) -> Self:
        """Wait until a request is answered with 200. Raises RuntimeError with the log if it is not."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._popen.poll() is None:
            try:
                if (await call(url, path, body)).status == 200:
                    self._tree = [self._tree[0], *self._tree[0].children(recursive=True)]
                    return self
            except OSError:
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self._popen.args!r} does not serve:\n{self._log.read_text(errors='replace')[-2000:]}")

    def cpu_s(self) -> float:
        """CPU seconds used so far by the whole tree, user and system."""
        return sum(_cpu_s(process) for process in self._tree)

    async def at_rest(self) -> float:
        """:meth:`cpu_s` once what the answers left behind is done."""
        used = self.cpu_s()
        for _ in range(40):
            await asyncio.sleep(0.05)
            before, used = used, self.cpu_s()
            if used - before < _SETTLED_S:
                break
        return used

    def rss(self) -> int:
        """Resident bytes of the whole tree."""
        return sum(process.memory_info().rss for process in self._tree)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()


def python(module: str, *arguments: str) -> list[str]:
    """A module of ours as a command."""
    return [sys.executable, "-m", module, *arguments]


def _cpu_s(process: psutil.Process) -> float:
    if sys.platform == "linux":
        # psutil's figure counts in hundredths of a second; the process's own CPU clock, in nanoseconds.
        return time.clock_gettime((~process.pid << 3) | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


def processors() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
