"""Processes known by pid *and* start time, so that a reused pid is never taken for ours.

Node agents and trainer ranks write the same two fields, ``pid`` and ``start_time``, into their residency files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

START_TOLERANCE_S = 2.0
"""Two readings of one process's start time may differ by the clock's adjustment, never by this much."""


class ProcessRecord(BaseModel):
    """Identity of a process; other fields of the file belong to its writer."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    start_time: float
    """Seconds since the epoch, as psutil gives it."""

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """Raises :class:`psutil.NoSuchProcess` if it is gone."""
        return cls(pid=pid, start_time=psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.start_time) < START_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and, where it leads its own group, its children too."""
        if not self.alive():
            return
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def records_in(path: Path) -> list[ProcessRecord]:
    """Every process that a residency file speaks of, however it is nested there.

    *Example*: ``gang.json`` holds ``{"gang": ..., "processes": [{"pid": 7, "start_time": 1.5}]}``.
    """
    try:
        todo: list[Any] = [json.loads(path.read_bytes())]
    except (FileNotFoundError, ValueError):
        return []
    found = []
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
            with contextlib.suppress(ValidationError):
                found.append(ProcessRecord.model_validate(item))
    return found


def write_json(path: Path, data: object) -> None:
    """Replace the file at once: a reader sees the old or the new text, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)


def stop_processes(records: Iterable[ProcessRecord], grace_s: float) -> int:
    """SIGTERM all of them together, SIGKILL those that are left after ``grace_s``; the number that were running."""
    running = [record for record in records if record.alive()]
    for record in running:
        # A parked engine is stopped (SIGSTOP): it takes SIGTERM only once it runs again.
        record.signal_group(signal.SIGTERM)
        record.signal_group(signal.SIGCONT)
    wait_gone(running, grace_s)
    for record in running:
        record.signal_group(signal.SIGKILL)
    wait_gone(running, 10.0)
    return len(running)


def wait_gone(records: Iterable[ProcessRecord], limit_s: float) -> bool:
    """Whether all of them ended within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    left = list(records)
    while left:
        _reap(left)
        left = [record for record in left if record.alive()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return not left


def _reap(records: Iterable[ProcessRecord]) -> None:
    """Collect those that are children of this process; others are reaped by their own parent."""
    for record in records:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(record.pid, os.WNOHANG)
