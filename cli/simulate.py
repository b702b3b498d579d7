"""`seamlessflow simulate`: a run file on a cluster that one does not have, and which tags it should have there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from activities.layers import policy_for, selection_for
from simulator.advice import Choice, advise, table
from simulator.cluster import Cluster
from simulator.cohorts import EXACT, shrunk
from simulator.gantt import draw
from simulator.presets import preset
from simulator.run import Scenario, simulate
from simulator.splits import best_tags, split
from simulator.trace import read_trace
from simulator.workload import Workload
from storage.errors import ConfigError
from workflows.scheduling import pipeline
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.pipeline import PipelinePolicy
from workflows.spec import PipelineSpec, RunSpec

PIPELINES = ("colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed")
AHEAD = 1000
"""Updates that the run still has before it when the simulation stops."""
HAS_BOUND = ("off_policy", "multiplexed")


@dataclass(frozen=True)
class Options:
    cluster_file: Path | None
    workload: str
    pipelines: tuple[str, ...]
    steps: int
    seed: int
    out: Path | None


def simulate_run(spec: RunSpec, given: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulate the run as it is and at its best, print table and advice, write pictures; returns the figures."""
    cluster = _cluster(given)
    endless = spec.pipeline.model_copy(update={"steps": given.steps + AHEAD})
    base = Scenario(
        policy=policy_for(spec.model_copy(update={"pipeline": endless})),
        selection=selection_for(spec),
        cluster=cluster,
        model=_model(spec),
        workload=read_workload(given.workload),
        group_size=spec.algorithm.group_size,
        seed=given.seed,
        target_in_flight=spec.pipeline.target_in_flight,
        batch_time_limit_s=spec.pipeline.batch_time_limit_s,
        stop_after=given.steps,
    )
    if cluster.size > EXACT:
        base = shrunk(base)
        say(f"{cluster.size} nodes are simulated as {base.cluster.size} cohorts of {base.stands_for} like nodes")
    choices = _choices(spec, base, given, say)
    print(table(choices) + "\n")
    present = next(iter(choices))
    ranked = [node.id for node in split(base, 1).cluster.each()]
    lines = advise(choices, present, ranked)
    print("\n".join(lines))
    if given.out is not None:
        _write(base, choices, given.out)
        say(f"pictures and figures: {given.out}")
    return {"pipelines": {name: choice.result.figures() for name, choice in choices.items()}, "advice": lines}


def _choices(spec: RunSpec, base: Scenario, given: Options, say: Callable[[str], None]) -> dict[str, Choice]:
    """First the run with the tags of the cluster file, then each pipeline with the tags that suit it best."""
    choices: dict[str, Choice] = {}
    tagged = sum(kind.count for kind in base.cluster.nodes if "train" in kind.tags)
    if tagged:
        choices[f"{base.policy.name} as tagged"] = Choice(tagged, simulate(base))
    for name in given.pipelines:
        say(f"looking for the best tags for {name}")
        choices[name] = Choice(*best_tags(replace(base, policy=_policy(spec, name, given.steps))))
    if not choices:
        raise ConfigError(
            "nothing to simulate: no node of the cluster file has the tag 'train' and no --pipeline is given"
        )
    return choices


def _cluster(given: Options) -> Cluster:
    if given.cluster_file is not None:
        return Cluster.read(given.cluster_file)
    if not given.workload.endswith(".jsonl"):
        raise ConfigError("--cluster is needed: only the trace of a run says which nodes there are")
    return read_trace(Path(given.workload)).measured.cluster()


def _policy(spec: RunSpec, name: str, steps: int) -> PipelinePolicy:
    bound = spec.pipeline.max_staleness if name in HAS_BOUND else None
    data = {**spec.pipeline.model_dump(), "name": name, "steps": steps + AHEAD, "max_staleness": bound, "policy": None}
    return pipeline.policy(PipelineSpec.model_validate(data), spec.algorithm.groups_per_step)


def _model(spec: RunSpec) -> ModelCost:
    path = Path(spec.model.path) / "config.json"
    try:
        return ModelCost.from_config(json.loads(path.read_text()), spec.model.dtype)
    except FileNotFoundError:
        raise ConfigError(f"model.path: {path} does not exist; its numbers say what the model costs") from None


def read_workload(name: str) -> Workload:
    """A preset's name, a YAML file of a workload, or a trace (``.jsonl``) of a real run."""
    path = Path(name)
    if path.suffix == ".jsonl":
        return read_trace(path).workload
    if path.suffix not in (".yaml", ".yml"):
        return preset(name).workload
    try:
        return Workload.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"workload file {path}: {error}") from None


def _write(base: Scenario, choices: dict[str, Choice], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, choice in choices.items():
        figures[name] = {"train_nodes": choice.trainers, **choice.result.figures()}
    (out / "figures.json").write_text(json.dumps(figures, indent=2))
    for name, choice in choices.items():
        policy = choice.result.policy or base.policy
        drawn = simulate(replace(split(base, choice.trainers), policy=policy, segments=True))
        for kind in ("svg", "png"):
            draw(drawn, out / f"{name.replace(' ', '-')}.{kind}", f"{name}, {choice.trainers} train nodes")
