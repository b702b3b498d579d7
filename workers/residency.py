"""Residency: what a node remembers of the processes it started, so that they outlive whoever watches them (I9).

A process is named by pid *and* start time, since pids are reused. Files are
written atomically with mode 0600 into ``nodes/<node>/``: ``engine.json``,
``gang.json`` and, by each trainer rank itself, ``rank-<r>.json``; the same for a reference or critic, with the role in
front: ``reference-gang.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from storage.errors import FencedError
from storage.processes import started_at
from workers.cluster import write_whole
from workflows.messages import WeightsRef

POLL_S = 0.05
TERM_LIMIT_S = 5.0


class ProcessRef(BaseModel):
    """A process, told apart from a later one with the same pid."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    start_time: float
    """As :func:`storage.processes.started_at` gives it."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Raises psutil.NoSuchProcess if it is gone already."""
        return cls(pid=pid, start_time=started_at(pid))

    def alive(self) -> bool:
        """Whether this very process runs; a zombie of ours is reaped and counts as dead."""
        try:
            if started_at(self.pid) != self.start_time:
                return False
            if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return False

    async def end(self) -> None:
        """SIGTERM, then SIGKILL after a few seconds, to it and all that it started; returns when they are gone."""
        for number, limit in ((signal.SIGTERM, TERM_LIMIT_S), (signal.SIGKILL, TERM_LIMIT_S)):
            if not self.alive():
                break
            self._signal(signal.SIGCONT)
            self._signal(number)
            await self._gone(limit)
        await self._sweep()

    def _signal(self, number: int) -> None:
        """To its group, which is its own if it was started in a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def _sweep(self) -> None:
        """End what is left of its group: a server's workers may outlive it, on the device that the next one needs.

        While a group has members its number is given to no new process; so if no process has the pid, they are ours.
        """
        end = time.monotonic() + TERM_LIMIT_S
        while not psutil.pid_exists(self.pid) and (rest := _members(self.pid)) and time.monotonic() < end:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)

    async def _gone(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if not self.alive():
                return True
            await asyncio.sleep(POLL_S)
        return False


def _members(group: int) -> list[int]:
    """The processes of a group, those left out that have ended and wait to be reaped."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


class ResidencyFile(BaseModel):
    """Base of what is kept in a residency file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically; readable by its owner only."""
        write_whole(path, self.model_dump_json())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What the file says; None if there is none, or one of another release."""
        try:
            return cls.model_validate_json(path.read_text())
        except (FileNotFoundError, ValidationError):
            return None


class EngineResidency(ResidencyFile):
    """The engine process of a node."""

    pid: int
    start_time: float
    host: str
    port: int
    run: str
    kind: str
    epoch: int
    serving: WeightsRef | None = None
    """Weights this process has confirmed by checksum; None until it has."""
    good: WeightsRef | None = None
    """Weights that an engine of the run confirmed last on this node: what a new process falls back to."""

    @property
    def process(self) -> ProcessRef:
        return ProcessRef(pid=self.pid, start_time=self.start_time)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class GangResidency(ResidencyFile):
    """The trainer ranks of a node and the gang they belong to; complete once ``processes`` has one entry a rank."""

    gang: str
    run: str
    ranks: tuple[int, ...]
    """Global rank numbers."""
    processes: tuple[ProcessRef, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.processes) == len(self.ranks)

    def dead(self) -> list[int]:
        """Global numbers of the ranks that do not run."""
        return [rank for rank, process in zip(self.ranks, self.processes, strict=False) if not process.alive()]


class EpochMemory:
    """The highest epoch a node has served; older ones are refused (I5)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.epoch = int(path.read_text()) if path.exists() else 0

    def admit(self, epoch: int) -> None:
        """Remember ``epoch``. Raises :class:`FencedError` if a newer one was seen."""
        if epoch < self.epoch:
            raise FencedError(f"epoch {epoch} is out of date on this node: it has served epoch {self.epoch}")
        if epoch > self.epoch:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(str(epoch))
            temporary.replace(self._path)
            self.epoch = epoch
