"""`seamlessflow node profile`: measure nodes through their agents, or this machine where no cluster runs."""

from __future__ import annotations

from pathlib import Path

from cli import stack
from cli.runs import Runs
from storage.errors import ConfigError
from workers.cluster import StateFolder
from workers.node_agent.profiler import measure
from workflows.messages import NodeProfiled, ProfileTask
from workflows.spec import NodeSpec


async def profile(
    state: StateFolder | None, node: str | None, model: Path | None, threads: int | None
) -> list[NodeProfiled]:
    """Measure ``node``, or all nodes of the running cluster one after the other.

    ``state`` None: no cluster, this machine is measured. ``model`` None: that of the runs in work. Raises
    :class:`ConfigError` where neither tells which model.
    """
    if state is None:
        if model is None:
            raise ConfigError("no cluster runs that would tell which model: name its folder with --model")
        task = ProfileTask(node=node or "here", model=str(model), threads=threads or 1)
        return [await measure(task)]
    runs = await Runs.connect(state.cluster())
    folder = str(model) if model else await _model(runs)
    known = {spec.id: spec for spec in stack.nodes_of(state)}
    up = [row.node for row in (await runs.pool_status()).nodes if row.health != "lost"]
    wanted = up if node is None else [node]
    if missing := sorted(set(wanted) - set(up)):
        raise ConfigError(f"node {missing[0]!r} does not serve; these do: {', '.join(up) or 'none'}")
    return [await runs.profile(_task(name, folder, threads, known.get(name))) for name in wanted]


def table(found: list[NodeProfiled]) -> str:
    """What was found, for people."""
    lines = [f"{'node':10}{'GFLOP/s':>9}{'GB/s':>7}{'role':>9}{'tokens/s':>10}{'error':>8}"]
    for one in found:
        peaks = f"{one.device.peak_flops / 1e9:9.0f}{one.device.bandwidth / 1e9:7.1f}"
        for rate in one.rates:
            lines.append(f"{one.node:10}{peaks}{rate.role:>9}{rate.predicted or 0:10.0f}{rate.error or 0:8.1%}")
        lines.append(f"{one.node:10}train_priority {one.train_priority:.3g} with {one.model}")
    return "\n".join(lines)


async def _model(runs: Runs) -> str:
    models = sorted(set((await runs.models()).values()))
    if len(models) != 1:
        raise ConfigError(f"runs train {', '.join(models) or 'nothing'}: name the folder of one model with --model")
    return models[0]


def _task(node: str, model: str, threads: int | None, spec: NodeSpec | None) -> ProfileTask:
    cores = spec.cores if spec else ()
    return ProfileTask(node=node, model=model, threads=threads or (spec.threads if spec else 1), cores=cores)
