"""Shared work of a node: a worker process for each of its tags whose work takes no lease.

Agents and rewards run beside whatever else the node does, for every run: the worker polls the tag's queue
(``sf-tag-agent``, ``sf-tag-reward``). It lives in a process of its own, is started again when it dies, and ends, giving
back what it ran, when the node loses the tag or is drained.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from workers.cluster import StateFolder
from workers.node_agent.spawn import spawn, tail
from workers.residency import ProcessRef, ResidencyFile
from workflows.scheduling.pool_state import SHARED_TAGS

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 2.0
"""Between two starts of a worker that dies."""


class SharedResidency(ResidencyFile):
    """A node's worker for one tag."""

    tag: str
    process: ProcessRef


def worker_command(state: Path, tag: str) -> list[str]:
    """Command line of the worker for one tag."""
    return [sys.executable, "-m", "workers.agents", "--state", str(state), "--role", tag]


class SharedWork:
    """The workers of one node. They outlive a node agent that is killed; the next one finds them."""

    def __init__(
        self, state: StateFolder, node: str, *, command: Callable[[Path, str], list[str]] = worker_command
    ) -> None:
        self._state = state
        self._node = node
        self._command = command
        self._started: dict[str, float] = {}

    def serving(self) -> frozenset[str]:
        """Tags whose worker lives."""
        return frozenset(tag for tag in SHARED_TAGS if self._living(tag) is not None)

    async def keep(self, tags: Collection[str]) -> None:
        """Have a worker for each shared tag among ``tags``, and none for the others."""
        for tag in SHARED_TAGS:
            if tag in tags:
                self._ensure(tag)
        await asyncio.gather(*(self._end(tag) for tag in SHARED_TAGS if tag not in tags))

    def _ensure(self, tag: str) -> None:
        started = self._started.get(tag)
        if self._living(tag) is not None or (started is not None and time.monotonic() < started + RESTART_PAUSE_S):
            return
        if started is not None:
            log.warning("the worker for %s has died; end of its log:\n%s", tag, tail(self._log(tag))[-1000:])
        self._started[tag] = time.monotonic()
        command = self._command(self._state.root, tag)
        process = spawn(command, log=self._log(tag), cores=(), threads=1, environment={})
        SharedResidency(tag=tag, process=process).write(self._file(tag))
        log.info("started the worker for %s, pid %d", tag, process.pid)

    async def _end(self, tag: str) -> None:
        found = SharedResidency.read(self._file(tag))
        self._started.pop(tag, None)
        if found is not None:
            await found.process.end()
            self._file(tag).unlink(missing_ok=True)
            log.info("ended the worker for %s", tag)

    def _living(self, tag: str) -> SharedResidency | None:
        found = SharedResidency.read(self._file(tag))
        return found if found is not None and found.process.alive() else None

    def _file(self, tag: str) -> Path:
        return self._state.node(self._node) / f"shared-{tag}.json"

    def _log(self, tag: str) -> Path:
        return self._state.logs / f"{tag}-{self._node}.log"
