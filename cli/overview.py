"""`seamlessflow status`: services, nodes and runs of one cluster, as data and as text."""

from __future__ import annotations

import io
from dataclasses import asdict
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.table import Table

from cli import stack
from cli.demo import Watcher
from cli.progress import SHOWN_STEPS, FailureRow, causes
from cli.runs import Runs
from storage.errors import SeamlessFlowError
from workers.cluster import StateFolder


async def collect(state: StateFolder, run: str | None) -> dict[str, Any]:
    """Everything that answers; ``trouble`` lists what does not."""
    trouble: list[str] = []
    supervisor = stack.StackStatus.read(state)
    up = stack.running(state)
    view: dict[str, Any] = {
        "state": str(state.root),
        "supervisor": (supervisor.phase if supervisor else "starting") if up else "not running",
        "temporal_ui": state.cluster().temporal_ui,
        "services": {name: row.model_dump(mode="json") for name, row in supervisor.services.items()}
        if supervisor
        else {},
        "nodes": [],
        "runs": [],
        "trouble": trouble,
    }
    if not up:
        return view
    try:
        runs = await Runs.connect(state.cluster(), deadline_s=10.0)
        nodes = (await runs.pool_status()).nodes
        view["nodes"] = [{**node.model_dump(mode="json"), "does": node.does} for node in nodes]
    except SeamlessFlowError as error:
        trouble.append(str(error))
    try:
        runs = await Runs.connect(state.cluster(), deadline_s=10.0)
        rows = [row for row in await runs.list() if run in (None, row.run)]
    except SeamlessFlowError as error:
        trouble.append(str(error))
        rows = []
    for row in rows:
        now, _ = await Watcher(state, row.run).look()
        rewards = [step.reward for step in now.rows if step.reward is not None]
        view["runs"].append(
            {
                "run": row.run,
                "state": row.state,
                "phase": now.phase,
                "step": now.step,
                "steps": now.steps,
                "reward": rewards[-1] if rewards else None,
                "tokens_per_s": now.tokens_per_s,
                "waiting_for": now.waiting_for,
                "log_prob_gaps": {row.step: row.gap for row in now.rows[-SHOWN_STEPS:]},
                "evaluations": [{"version": version, "reward": reward} for version, reward in now.evaluations],
                "failures": [asdict(failure) for failure in now.failures],
                "trouble": now.trouble,
            }
        )
    return view


def render(view: dict[str, Any]) -> str:
    """The view as tables."""
    console = Console(file=io.StringIO(), width=120)
    console.print(f"{view['state']}: supervisor {view['supervisor']}, Temporal UI {view['temporal_ui']}")
    services = Table("service", "state", "pid", "restarts", "last exit", box=None)
    for name, row in view["services"].items():
        pid = str(row["process"]["pid"]) if row["process"] else ""
        services.add_row(name, row["state"], pid, str(row["restarts"]), row["last_exit"])
    console.print(services)
    if view["nodes"]:
        nodes = Table("node", "tags", "health", "does", "lease", "decode tokens/s", "train tokens/s", box=None)
        for row in view["nodes"]:
            rates = {rate["role"]: rate for rate in row.get("rates", ())}
            nodes.add_row(
                row["node"],
                ",".join(row["tags"]),
                row["health"],
                row["does"],
                row["lease"] or "",
                *(_rate(rates.get(role)) for role in ("decode", "train")),
            )
        console.print(nodes)
    if view["runs"]:
        runs = Table("run", "state", "phase", "step", "reward", "tokens/s", "waits for", box=None)
        for row in view["runs"]:
            reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
            step = f"{row['step']}/{row['steps']}"
            runs.add_row(
                row["run"], row["state"], row["phase"], step, reward, f"{row['tokens_per_s']:.0f}", row["waiting_for"]
            )
        console.print(runs)
    if len(view["runs"]) == 1 and view["runs"][0]["log_prob_gaps"]:
        console.print(_gaps(view["runs"][0]["log_prob_gaps"]), highlight=False)
    for row in view["runs"]:
        _show_failures(console, row, in_full=len(view["runs"]) == 1)
    for line in [*view["trouble"], *(row["trouble"] for row in view["runs"] if row["trouble"])]:
        console.print(line)
    file = console.file
    assert isinstance(file, io.StringIO)  # noqa: S101  # made above
    return file.getvalue().rstrip()


def _gaps(gaps: dict[int, float | None]) -> str:
    measured = ", ".join(f"{step + 1}: {gap:.1e}" for step, gap in gaps.items() if gap is not None)
    without = ", ".join(str(step + 1) for step, gap in gaps.items() if gap is None)
    parts = [measured, f"no token of the same weights in {without}" if without else ""]
    return f"log-prob gap of engine and trainer, by step: {'; '.join(filter(None, parts))}"


def _rate(rate: dict[str, Any] | None) -> str:
    """*Example*: ``812, predicted 790, off by 4 %``."""
    if rate is None:
        return ""
    off = "" if rate["error"] is None else f", off by {rate['error']:.0%}"
    if rate["measured"] is None:
        return f"predicted {rate['predicted']:.0f}{off}"
    return f"{rate['measured']:.0f}, predicted {rate['predicted']:.0f}{off}"


def _show_failures(console: Console, row: dict[str, Any], *, in_full: bool) -> None:
    """Causes with counts; in full with what happened to the last attempt of each."""
    if not row["failures"]:
        return
    failures = [FailureRow(**failure) for failure in row["failures"]]
    console.print(f"{row['run']}: attempts without a result: {causes(failures)}")
    for failure in failures if in_full else ():
        console.print(f"  {failure.cause}, the last one is {failure.sample}:", highlight=False)
        console.print(indent(failure.detail.rstrip(), "    "), markup=False, highlight=False)
