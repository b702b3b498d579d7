"""The runs of the proof on one local cluster, and what its ledger says of each."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from temporalio.client import WorkflowExecutionStatus

from benchmarks.learning.curves import Row, group_rewards, staleness
from benchmarks.learning.plan import NODES, TASKS, Cell, run_file
from cli import stack
from cli.runs import Runs
from storage.errors import DeadlineError, SeamlessFlowError
from storage.ledger import TRAIN, Ledger
from workers.cluster import STATE_VARIABLE, StateFolder
from workflows.spec import RunSpec

POLL_S = 1.0
LIMIT_S = 3600.0
"""Of one run."""
BUILD_LIMIT_S = 1800.0
METER_S = 2.0


def make_models(tasks: Sequence[str], models: Path, say: Callable[[str], None]) -> None:
    """Model and tasks of each task, unless they are there; a folder appears when it is whole."""
    for name in tasks:
        folder, making = models / name, models / f"{name}.making"
        if folder.exists():
            continue
        say(f"making the model and the tasks of {name} in {folder}")
        for module in TASKS[name].build:
            subprocess.run([sys.executable, "-m", module, "--out", str(making)], check=True, timeout=BUILD_LIMIT_S)
        making.rename(folder)


def run_all(state: Path, cells: Sequence[Cell], keep: Callable[[Row], None], say: Callable[[str], None]) -> None:
    """Make the runs, and hand over each as it ends. A run that was begun before goes on.

    Raises :class:`SeamlessFlowError` if one fails.
    """
    make_models(sorted({cell.task for cell in cells}), state / "models", say)
    cluster = StateFolder(state)
    stack.up(cluster, NODES, say=say)
    try:
        asyncio.run(_metered(cluster, Bench(state / "models", cells, keep, say)))
    finally:
        stack.down(cluster)


@dataclass(frozen=True)
class Bench:
    """What is to be made, and whom to tell."""

    models: Path
    cells: Sequence[Cell]
    keep: Callable[[Row], None]
    say: Callable[[str], None]

    async def make(self, state: StateFolder) -> None:
        """One task after the other, so that the larger model's runs have the machine to themselves."""
        runs = await Runs.connect(state.cluster())
        for name, task in TASKS.items():
            await asyncio.gather(*(self._lane(runs, state, name, number) for number in range(len(task.lanes))))

    async def _lane(self, runs: Runs, state: StateFolder, task: str, number: int) -> None:
        for cell in self.cells:
            if (cell.task, cell.lane) == (task, number):
                self.say(f"{cell.run} begins")
                row = await _one(runs, state, cell, run_file(cell, self.models))
                self.keep(row)


async def _metered(state: StateFolder, bench: Bench) -> None:
    meter, began = CpuMeter(state), time.monotonic()
    watch = asyncio.create_task(meter.watch())
    try:
        await bench.make(state)
    finally:
        watch.cancel()
        bench.say(f"{time.monotonic() - began:.0f} s, {meter.seconds():.0f} CPU seconds of the cluster's processes")


async def _one(runs: Runs, state: StateFolder, cell: Cell, spec: RunSpec) -> Row:
    began = time.monotonic()
    await runs.start(spec)
    while await runs.state(spec.run) == WorkflowExecutionStatus.RUNNING:
        if time.monotonic() - began > LIMIT_S:
            raise DeadlineError(f"run {spec.run} did not end within {LIMIT_S:g} s")
        await asyncio.sleep(POLL_S)
    wall_s = round(time.monotonic() - began, 1)
    result = await runs.result(spec.run)
    if not result.balanced or result.steps != spec.pipeline.steps:
        raise SeamlessFlowError(f"run {spec.run} made {result.steps} steps, books balanced: {result.balanced}")
    return await asyncio.to_thread(read_row, state, cell, result.steps, wall_s)


def read_row(state: StateFolder, cell: Cell, steps: int, wall_s: float) -> Row:
    """What the ledger says of a run that has ended after so many steps."""
    ledger = Ledger(state.cluster().ledger_url)
    try:
        return Row(
            task=cell.task,
            setting=cell.setting,
            seed=cell.seed,
            digest=cell.digest(),
            rewards=group_rewards(ledger.samples(cell.run, TRAIN), steps),
            staleness=staleness(ledger.steps(cell.run)),
            wall_s=wall_s,
        )
    finally:
        ledger.close()


class CpuMeter:
    """CPU seconds of a cluster's processes, those that end included (but for their last moments)."""

    def __init__(self, state: StateFolder) -> None:
        self._root = str(state.root)
        self._seconds: dict[tuple[int, float], float] = {}

    async def watch(self) -> None:
        """Look on, until cancelled."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(METER_S)

    def seconds(self) -> float:
        """CPU seconds so far."""
        self._look()
        return sum(self._seconds.values())

    def _look(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
                if process.environ().get(STATE_VARIABLE) == self._root:
                    used = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = used.user + used.system
