"""All five pipelines live, one after another on one cluster: two nodes, one core each, the tiny model, a long tail.

    python -m benchmarks.pipeline.live [--pipelines multiplexed,...] [--steps N] [--groups N] [--max-running N]

Prints a table and, last, one JSON line. Idle of a node: 1 - seconds with at least one generation, or an update, per
second held; changes of roles count as idle and are shown apart. Control processes are not pinned with the nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from benchmarks.pipeline.live_agent import make_tasks, write_tasks
from benchmarks.pipeline.live_figures import figures, p50, preemptions_ms
from benchmarks.pipeline.live_model import CONTEXT
from cli import stack
from cli.runs import Runs
from cli.stack import StackStatus
from storage.errors import DeadlineError, SeamlessFlowError
from storage.ledger import Ledger
from workers.cluster import StateFolder
from workflows.calls import run_id
from workflows.spec import RunSpec

PIPELINES = ("colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed")
TASKS = 500
IN_FLIGHT = 8
"""Sessions that may run, by sequences that an engine decodes together: more than both nodes are sent."""
POLL_S = 0.5
END_LIMIT_S = 90.0


@dataclass(frozen=True)
class LiveSettings:
    """One bench."""

    pipelines: tuple[str, ...] = PIPELINES
    steps: int = 7
    groups_per_step: int = 10
    """So many that a change of roles is as small a part of a step as on the clusters of the presets, some per cent."""
    group_size: int = 8
    max_running: int = 2
    """Sequences that an engine decodes together: with so few, rollout is four times the work of training, about as
    published for agents."""
    median_tokens: float = 260.0
    sigma: float = 0.8
    median_pause_s: float = 0.15
    cores: tuple[int, int] = (0, 1)
    time_limit_s: float = 900.0
    """Of one pipeline."""
    seed: int = 0
    state: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="bench-pipeline-")))
    """Kept: it holds the runs' own record, by which the simulator is calibrated."""


def run_live(settings: LiveSettings) -> dict[str, Any]:
    """By pipeline: ``idle_fraction``, ``tokens_per_s``, ``wall_s``, ``staleness_mean`` and what explains them; and
    ``preempt_ms_p50``, ``record`` (the state folder and the runs in it).

    A run that fails or takes longer than its limit is under ``failed``, with why.
    """
    _prepare(settings)
    state = StateFolder(settings.state / "cluster")
    specs = [run_file(settings, name) for name in settings.pipelines]
    stack.up(state, specs[0].nodes, say=_say)
    try:
        return asyncio.run(_all(settings, state, specs))
    finally:
        stack.down(state)


def run_file(settings: LiveSettings, name: str) -> RunSpec:
    """The bench's run under one pipeline; nothing but the pipeline differs."""
    first, second = settings.cores
    return RunSpec.model_validate(
        {
            "run": name.replace("_", "-"),
            "seed": settings.seed,
            "code": str(Path(__file__).resolve().parents[2]),
            "model": {"path": str(settings.state / "model"), "max_context": CONTEXT, "tool_parser": "none"},
            "data": {"path": str(settings.state / "tasks.jsonl"), "shuffle": False},
            "agent": {"kind": "python", "target": "benchmarks.pipeline.live_agent:run", "max_turns": 2},
            "reward": {"target": "benchmarks.pipeline.live_agent:noise"},
            "sampling": {"max_tokens": CONTEXT},
            "nodes": [
                {"id": "node-a", "tags": ["rollout", "train"], "cores": [first]},
                {"id": "node-b", "tags": ["rollout"], "cores": [second]},
            ],
            "engine": {"kind": "embedded", "max_running": settings.max_running, "kv_tokens": 65536},
            "algorithm": {"group_size": settings.group_size, "groups_per_step": settings.groups_per_step},
            "trainer": {"learning_rate": 1e-5},
            "pipeline": {
                "name": name,
                "accumulate": name in ("micro_batch", "multiplexed"),
                "steps": settings.steps,
                "target_in_flight": IN_FLIGHT * settings.max_running,
                "batch_time_limit_s": settings.time_limit_s,
            },
        }
    )


def _prepare(settings: LiveSettings) -> None:
    settings.state.mkdir(parents=True, exist_ok=True)
    model = settings.state / "model"
    if not model.exists():
        command = [sys.executable, "-m", "benchmarks.pipeline.live_model", "--out", str(model)]
        subprocess.run(command, check=True, timeout=120)
    shape = {"median_tokens": settings.median_tokens, "sigma": settings.sigma}
    tasks = make_tasks(TASKS, settings.seed, median_pause_s=settings.median_pause_s, **shape)
    write_tasks(settings.state / "tasks.jsonl", tasks)


async def _all(settings: LiveSettings, state: StateFolder, specs: Sequence[RunSpec]) -> dict[str, Any]:
    cluster = state.cluster()
    runs = await Runs.connect(cluster)
    client = await Client.connect(cluster.temporal, namespace=cluster.namespace, data_converter=pydantic_data_converter)
    result: dict[str, Any] = {}
    preempted: list[float] = []
    failed: dict[str, str] = {}
    for spec in specs:
        name = spec.pipeline.name
        before, began = control_cpu_s(state), time.monotonic()
        try:
            await _one(settings, runs, spec)
        except SeamlessFlowError as error:  # the others are still worth knowing
            failed[name] = str(error)
            _say(f"{name} failed: {error}")
            await _end(client, spec)
            continue
        cpu, took = control_cpu_s(state), time.monotonic() - began
        cores = {service: round((cpu[service] - before.get(service, 0.0)) / took, 3) for service in cpu}
        result[name] = {**await asyncio.to_thread(_measured, cluster.ledger_url, spec), "control_cores": cores}
        preempted += await preemptions_ms(client, spec.run)
        _say(f"{name}: {json.dumps(result[name])}")
    record = {"state": str(state.root), "runs": {s.pipeline.name: s.run for s in specs if s.pipeline.name in result}}
    shared = {"preempt_ms_p50": p50(preempted), "preemptions": len(preempted), "record": record, "failed": failed}
    return {**result, **shared}


def _measured(ledger_url: str, spec: RunSpec) -> dict[str, object]:
    ledger = Ledger(ledger_url)
    try:
        return figures(ledger.intervals(spec.run), ledger.steps(spec.run), [node.id for node in spec.nodes])
    finally:
        ledger.close()


async def _end(client: Client, spec: RunSpec) -> None:
    """Cancel a run that failed the bench, so that the next one finds its nodes free."""
    handle = client.get_workflow_handle(run_id(spec.run))
    with contextlib.suppress(RPCError, WorkflowFailureError, TimeoutError):  # it may have ended by itself
        await handle.cancel()
        await asyncio.wait_for(handle.result(), END_LIMIT_S)


def control_cpu_s(state: StateFolder) -> dict[str, float]:
    """CPU seconds of each control process so far, its children included but for engines and trainers of nodes."""
    status = StackStatus.read(state)
    found: dict[str, float] = {}
    for name, service in (status.services if status else {}).items():
        if service.process is None or not service.process.alive():
            continue
        process = psutil.Process(service.process.pid)
        found[name] = _cpu_s(process)
        if not name.startswith("node-"):
            ended = process.cpu_times()
            found[name] += ended.children_user + ended.children_system
            found[name] += sum(map(_cpu_s, process.children(recursive=True)))
    return found


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


async def _one(settings: LiveSettings, runs: Runs, spec: RunSpec) -> None:
    began = time.monotonic()
    await runs.start(spec)
    while await runs.state(spec.run) == WorkflowExecutionStatus.RUNNING:
        if time.monotonic() - began > settings.time_limit_s:
            raise DeadlineError(f"run {spec.run} did not end within {settings.time_limit_s:g} s")
        await asyncio.sleep(POLL_S)
    result = await runs.result(spec.run)
    if not result.balanced or result.steps != settings.steps:
        raise SeamlessFlowError(f"run {spec.run} made {result.steps} steps, books balanced: {result.balanced}")


def table(result: dict[str, Any]) -> str:
    """A line a pipeline."""
    lines = [
        f"{'pipeline':<14} {'idle':>7} {'tokens/s':>9} {'wall s':>7} {'stale':>6} {'train s':>8} {'control':>8}  "
        "idle by node"
    ]
    for name in PIPELINES:
        if name in result:
            f = result[name]
            nodes = "; ".join(f"{n} {v:.1%}{_why(f['idle_s'][n])}" for n, v in f["idle_by_node"].items())
            lines.append(
                f"{name:<14} {f['idle_fraction']:>7.1%} {f['tokens_per_s']:>9} {f['wall_s']:>7} "
                f"{f['staleness_mean']:>6.2f} {f['train_s']:>8} {sum(f['control_cores'].values()):>8.2f}  {nodes}"
            )
    lines.append("control: cores that the control processes kept busy; they are not pinned and share the nodes' cores")
    return "\n".join([*lines, f"pre-empt signal to engine stopped, p50: {result['preempt_ms_p50']} ms"])


def _why(idle_s: dict[str, float]) -> str:
    reasons = [f"{reason} {seconds} s" for reason, seconds in idle_s.items() if seconds]
    return f" ({', '.join(reasons)})" if reasons else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", default=",".join(PIPELINES))
    parser.add_argument("--steps", type=int, default=LiveSettings.steps)
    parser.add_argument("--groups", type=int, default=LiveSettings.groups_per_step, help="of a step")
    parser.add_argument("--max-running", type=int, default=LiveSettings.max_running, help="sequences of an engine")
    given = parser.parse_args()
    settings = LiveSettings(
        pipelines=tuple(given.pipelines.split(",")),
        steps=given.steps,
        groups_per_step=given.groups,
        max_running=given.max_running,
    )
    result = run_live(settings)
    print(table(result))
    print(json.dumps({"bench": "pipeline-live", **result}))


if __name__ == "__main__":
    main()
