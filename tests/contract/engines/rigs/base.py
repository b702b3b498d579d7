"""What the contract suite needs to know of an engine: one small :class:`Rig` for each kind.

A rig starts the real process through the launcher that a node agent uses, says what the engine refuses, and makes its
adapter. Everything the suite asks of an engine goes through :class:`workers.engines.base.Engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from storage.errors import EngineError
from storage.ports import free_port
from tests.contract.engines.models import CONTEXT
from workers.engines.base import FEATURES, Engine
from workers.engines.kinds import KINDS
from workers.engines.launch import Place
from workers.node_agent.spawn import tail
from workers.residency import ProcessRef
from workflows.spec import RunSpec

ABILITIES = frozenset(
    {
        "policy",  # its tokens come from the model's weights
        "min_p",
        "seeds",
        "stop_strings",
        "abort_partial",  # an aborted request gives back what it has
        "pause_abort",
        "pause_retract",
        "pause_in_place",
        "spans",  # the engine says the exact weight version of every token
        "abort_in_place",  # a request that is aborted while the engine is paused in place ends at once
        "update_lands_at_once",  # unpaused, new weights come between two tokens, not after the running requests
        "queue",  # requests beyond ``engine.max_running`` wait
        "checks_weights",  # a checkpoint that does not fit is refused
        "release_memory",
        "tied_and_untied",  # serves Qwen3 with a tied and Llama with an untied head
        "collective",  # weights by broadcast
    }
) | frozenset().union(*FEATURES.values())
"""What an engine may be able to do. What it is not able to do it refuses, and the suite checks that it does."""


DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: a test run that is killed leaves no server behind
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Process:
    """A running engine."""

    url: str
    pid: int
    log: Path
    model: Path

    def signal(self, number: int) -> None:
        """To all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def alive(self) -> bool:
        """Whether its first process runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False


class Rig:
    """Base of all rigs; a subclass sets what differs."""

    kind: ClassVar[str]
    abilities: ClassVar[frozenset[str]]
    """Of :data:`ABILITIES`."""
    start_limit_s: ClassVar[float] = 900.0
    engine: ClassVar[dict[str, Any]] = {}
    """Keys of the run file's section ``engine``."""

    def missing(self) -> str | None:
        """Why the engine cannot run here; it names the make target."""
        if self.kind not in KINDS:
            return f"no adapter for {self.kind}"
        return KINDS[self.kind].problem(self.spec(Path("model")).engine)

    def spec(self, model: Path) -> RunSpec:
        """A run file that names this engine."""
        return RunSpec.model_validate(
            {
                "run": "contract",
                "model": {"path": str(model), "max_context": CONTEXT},
                "data": {"path": "tasks.jsonl"},
                "reward": {"target": "reward:score"},
                "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
                "engine": {"kind": self.kind, "kv_tokens": 131072, "max_running": 16, **self.engine},
            }
        )

    @contextlib.contextmanager
    def start(self, model: Path, folder: Path) -> Iterator[Process]:
        """The engine as a process of its own, ready; it is killed whole at the end."""
        spec, port = self.spec(model), free_port()
        launch = KINDS[self.kind].launch(spec, Place(spec.nodes[0], "127.0.0.1", port, folder / "tokens.jsonl"))
        log = folder / "engine.log"
        with log.open("ab") as output:
            started = subprocess.Popen(
                [sys.executable, "-c", DIE_WITH_PARENT, *launch.command, *self.arguments(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **launch.environment},
            )
        process = Process(f"http://127.0.0.1:{port}", started.pid, log, model)
        try:
            reference = ProcessRef.of(started.pid)
            with ThreadPoolExecutor(1) as thread:  # a loop of its own, whatever runs here
                thread.submit(asyncio.run, self._until_ready(process, reference)).result()
            yield process
        finally:
            process.signal(signal.SIGKILL)
            started.wait()

    async def _until_ready(self, process: Process, reference: ProcessRef) -> None:
        adapter = self.connect(process.url)
        try:
            async with asyncio.timeout(self.start_limit_s):
                while not await self._answers(adapter):
                    if not reference.alive():
                        raise AssertionError(f"{self.kind} did not start:\n{tail(process.log)}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(
                f"{self.kind} was not ready in {self.start_limit_s:g} s:\n{tail(process.log)}"
            ) from None
        finally:
            await adapter.close()

    async def _answers(self, adapter: Engine) -> bool:
        try:
            return await adapter.ready()
        except EngineError:
            return False

    def arguments(self, folder: Path) -> Sequence[str]:
        """Words that the command line gets beyond the launcher's."""
        return ()

    def connect(self, url: str, **limits: float) -> Engine:
        """The adapter as production uses it; ``limits``: ``deadline_s``, ``load_deadline_s``, ``stall_s``."""
        return KINDS[self.kind].connect(url, **limits)

    async def version(self, engine: Engine) -> str:
        """Of the engine's release."""
        raise NotImplementedError
