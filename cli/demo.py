"""`seamlessflow demo`: from a run file to a trained model and one JSON line, in one command that can be repeated.

Every part goes on from where it was: the model is built once, the cluster is started or found, the run is
started or found. Interrupted, the cluster is stopped and its state kept; the same command goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from rich.console import Console
from temporalio.client import WorkflowExecutionStatus

from cli import stack
from cli.check import MODEL_FILES, require_run
from cli.processes import write_json
from cli.progress import LiveView, PlainView, Snapshot, snapshot
from cli.runfile import load_run
from cli.runs import Runs
from proxy.client import ControlClient
from storage.errors import ConfigError, DeadlineError, NotFoundError, SeamlessFlowError
from workers.cluster import StateFolder
from workers.engines.kinds import KINDS
from workers.engines.launch import on_cuda
from workflows.spec import RunSpec

LOOK_EVERY_S = 1.0
ASK_LIMIT_S = 10.0
BUILD_LIMIT_S = 1800.0
CPU_STEPS = 4
"""Of a demo on a real server without a GPU."""
CLOCK_FILE = "demo-clock.json"

Answer = TypeVar("Answer")


class Interrupted(SeamlessFlowError):
    """Ctrl-C or SIGTERM; the cluster was stopped, its state is on disk."""


@dataclass(frozen=True)
class DemoOptions:
    """What the command line of `seamlessflow demo` says."""

    run_file: Path
    state: StateFolder
    build: tuple[str, ...] = ()
    """Modules that make model and data, each run as ``python -m <module> --out <parent of model.path>``."""
    keep: bool = False
    """Leave the cluster running at the end."""
    time_limit_s: float = 3600.0
    engine: str | None = None
    """In place of the run file's ``engine.kind``."""
    steps: int | None = None
    """In place of the run file's ``pipeline.steps``; None: as it says, but few of a real server on the CPU."""


@dataclass(frozen=True)
class Figures:
    """What a demo came to."""

    line: dict[str, Any]
    """The last line of output."""
    balanced: bool
    """Whether every sample and every journalled token is accounted for."""


def demo(options: DemoOptions, say: Callable[[str], None]) -> Figures:
    """Run to the end.

    Raises :class:`Interrupted`, :class:`DeadlineError` after the time limit, :class:`ConfigError` for a wrong run file.
    """
    clock = Clock(options.state)
    build_if_missing(options, say)
    spec = _spec(options, say)
    with _interruptible():
        stop, ran_before = not options.keep, stack.running(options.state)
        try:
            say(f"state folder: {options.state.root}")
            stack.up(options.state, spec.nodes, say=say)
            return asyncio.run(_follow(options, spec, clock, say))
        except ConfigError:  # refused: a cluster that others may use is left as it was found
            stop = stop and not ran_before
            raise
        except KeyboardInterrupt:
            stop = True
            raise Interrupted(f"the same command goes on from where it was (state in {options.state.root})") from None
        finally:
            if stop:
                with _ignore_interrupts():
                    say("stopping the cluster; its state stays on disk")
                    stack.down(options.state)


def _spec(options: DemoOptions, say: Callable[[str], None]) -> RunSpec:
    spec = require_run(options.run_file, engine=options.engine, steps=options.steps)
    kind, steps = KINDS[spec.engine.kind], spec.pipeline.steps
    if options.steps is not None or not kind.own_environment or on_cuda(spec.engine.device) or steps <= CPU_STEPS:
        return spec
    say(f"{kind.name} is slow on the CPU: {CPU_STEPS} steps in place of {steps} (--steps N, or STEPS=N for make)")
    return require_run(options.run_file, engine=options.engine, steps=CPU_STEPS)


def build_if_missing(options: DemoOptions, say: Callable[[str], None]) -> None:
    """Make model and data by ``options.build`` unless they are there; a half-made folder is never left behind."""
    model = Path(load_run(options.run_file).model.path)
    if not options.build or all((model / name).is_file() for name in MODEL_FILES):
        return
    out = model.parent
    if out.exists():
        raise ConfigError(f"{out} exists, but {model} is not complete: remove {out}, it will be made anew")
    making = out.with_name(f"{out.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    say(f"making the model and its tasks in {out}")
    for module in options.build:
        command = [sys.executable, "-m", module, "--out", str(making)]
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=BUILD_LIMIT_S)
        except subprocess.CalledProcessError as error:
            raise ConfigError(f"{' '.join(command)} ended with exit code {error.returncode}") from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{' '.join(command)} did not end within {BUILD_LIMIT_S:.0f} s") from error
    making.rename(out)


class Clock:
    """Seconds that the demo has been worked on, over all interruptions; kept in the state folder."""

    def __init__(self, state: StateFolder) -> None:
        self._path = state.root / CLOCK_FILE
        self._before = 0.0
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            self._before = float(json.loads(self._path.read_text())["seconds"])
        self._started = time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def save(self) -> None:
        write_json(self._path, {"seconds": round(self.seconds(), 3)})


class Watcher:
    """Looks at a run from all sides; a side that does not answer is shown as trouble, and asked again."""

    def __init__(self, state: StateFolder, run: str) -> None:
        self.run = run
        self._state = state
        self._runs: Runs | None = None

    async def look(self) -> tuple[Snapshot, WorkflowExecutionStatus | None]:
        """The run now, and how Temporal sees it (None: unknown at the moment)."""
        trouble: list[str] = []
        control = await self._ask("proxy", trouble, self._control())
        runs = await self._ask("temporal", trouble, self.connected())
        if runs is None:
            return snapshot(self.run, control, None, None, "; ".join(trouble)), None
        status = await self._ask("run", trouble, runs.status(self.run))
        step = await self._ask("step", trouble, runs.step(status)) if status else None
        pool = await self._ask("pool", trouble, runs.pool_status())
        state = await self._ask("temporal", trouble, runs.state(self.run))
        return snapshot(self.run, control, status, pool, "; ".join(trouble), step), state

    async def connected(self) -> Runs:
        if self._runs is None:
            self._runs = await Runs.connect(self._state.cluster(), deadline_s=ASK_LIMIT_S)
        return self._runs

    def forget_connection(self) -> None:
        """After a restart of the cluster the server may have another port."""
        self._runs = None

    async def _control(self) -> dict[str, Any] | None:
        async with control_client(self._state, deadline_s=ASK_LIMIT_S) as client:
            try:
                return await client.run_status(self.run)
            except NotFoundError:  # it has not opened its books yet; that there is no such run, Temporal says
                return None

    async def _ask(self, who: str, trouble: list[str], call: Awaitable[Answer]) -> Answer | None:
        try:
            return await call
        except (SeamlessFlowError, aiohttp.ClientError) as error:
            trouble.append(f"{who}: {error}")
            return None


def control_client(state: StateFolder, *, deadline_s: float = 60.0) -> ControlClient:
    """The proxy's control API of this cluster."""
    return ControlClient(state.cluster().proxy_urls, state.secrets().control_key, deadline_s=deadline_s)


async def _follow(options: DemoOptions, spec: RunSpec, clock: Clock, say: Callable[[str], None]) -> Figures:
    watcher = Watcher(options.state, spec.run)
    runs = await watcher.connected()
    started = await runs.start(spec)
    ended_before = await runs.state(spec.run) == WorkflowExecutionStatus.COMPLETED
    say(f"run {spec.run} is {'started' if started else 'finished already' if ended_before else 'found, and goes on'}")
    ui = f"{options.state.cluster().temporal_ui}/namespaces/{options.state.cluster().namespace}/workflows"
    say(f"Temporal UI: {ui}")
    deadline = time.monotonic() + options.time_limit_s
    with _view(say, {"Temporal UI": ui, "logs": str(options.state.logs)}) as view:
        while True:
            now, state = await watcher.look()
            view.show(now)
            if not ended_before:
                clock.save()
            if state is not None and state != WorkflowExecutionStatus.RUNNING:
                break
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"run {spec.run} did not end within {options.time_limit_s:.0f} s: {now.phase}, {now.trouble}"
                )
            if not stack.running(options.state):
                say("the supervisor is gone: starting it again")
                await asyncio.to_thread(stack.up, options.state, spec.nodes, say=say)
                watcher.forget_connection()
            await asyncio.sleep(LOOK_EVERY_S)
    if state != WorkflowExecutionStatus.COMPLETED:
        say(
            f"run {spec.run} has {state.name.lower()} at step {now.step + 1}: "
            "mend the cause and repeat the command, it goes on from there"
        )
    for failure in now.failures:
        say(f"{failure.attempts} attempts ended with {failure.cause}; the last, {failure.sample}: {failure.detail}")
    return await figures(options.state, spec, await watcher.connected(), clock.seconds())


async def figures(state: StateFolder, spec: RunSpec, runs: Runs, seconds: float) -> Figures:
    """What the run came to. Raises :class:`SeamlessFlowError` if it failed."""
    result = await runs.result(spec.run)
    async with control_client(state) as client:
        control = await client.run_status(spec.run)
        audit = await client.audit(spec.run)
    model = Path(spec.model.path)
    line = {
        "bench": spec.run,
        "model": model.parent.name if model.name == "model" else model.name,
        "reward_before": result.reward_before,
        "reward_after": result.reward_after,
        "steps": result.steps,
        "seconds": round(seconds, 1),
        "ledger_balanced": bool(control["books"]["balanced"]) and result.balanced,
        "tokens_lost": audit["tokens_lost"],
        "forks": control["forks"],
        "overlap_fraction": control["overlap_fraction"],
    }
    return Figures(line, balanced=line["ledger_balanced"] and not audit["tokens_lost"] and not audit["mismatches"])


def _view(say: Callable[[str], None], links: dict[str, str]) -> LiveView | PlainView:
    console = Console(stderr=True)
    return LiveView(console, links) if console.is_terminal else PlainView(say, time.monotonic)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C, and both work where the shell started us with SIGINT ignored (in the background)."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the cluster running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
