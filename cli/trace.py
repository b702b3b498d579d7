"""`seamlessflow trace export`: a run's own record as input of the simulator, without a word of what was said."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from cli.reach import store_of
from simulator.trace import Measured, MeasuredNode, Timed, Trace, fit_token_s, fit_update, lines_of
from storage import shards
from storage.errors import ConfigError
from storage.ledger import TRAIN, Interval, Ledger, StepRecord
from storage.tree import Shard, path_to
from workers.cluster import StateFolder
from workflows.scheduling import pipeline
from workflows.spec import RunSpec

WARM_UP = 2
"""Updates that are not compared: processes start in the first, and in the second costs are measured."""


def export(state: StateFolder, run: str) -> Trace:
    """Read ledger and shards of a run that has made at least two updates.

    Raises :class:`ConfigError` if there is too little to measure.
    """
    ledger = Ledger(state.cluster().ledger_url)
    try:
        spec = RunSpec.model_validate(ledger.run_info(run).spec)
        steps, intervals = ledger.steps(run), ledger.intervals(run)
        lives = {
            record.session: (record.created, record.ended)
            for row in ledger.samples(run, TRAIN)
            if row.session is not None and (record := ledger.session(row.session)).ended is not None
        }
    finally:
        ledger.close()
    with store_of(state) as store:
        keys = store.list(shards.prefix_of(run))
        sessions = {name: timed for key in keys for name, timed in _timed(shards.decode(store.get(key)), lives).items()}
    if len(steps) < 2 or not sessions:
        raise ConfigError(f"run {run} has {len(steps)} updates and {len(sessions)} sessions: too little to measure")
    rates = _rates(spec, steps, intervals, [(lives[name][0], timed) for name, timed in sessions.items()])
    measured = _measured(run, spec, steps, intervals, rates)
    return Trace(measured=measured, lines=lines_of(list(sessions.values()), rates[0]))


def _rates(
    spec: RunSpec, steps: Sequence[StepRecord], intervals: Sequence[Interval], sessions: Sequence[tuple[float, Timed]]
) -> tuple[float, float]:
    """Seconds of a token and mean batch, behind the warm-up as far as anything began there."""
    commits = sorted(step.recorded for step in steps)
    since = commits[min(WARM_UP, len(commits) - 1) - 1]
    later = [timed for began, timed in sessions if began >= since]
    if not later:
        since, later = 0.0, [timed for _, timed in sessions]
    busy_s = sum(max(0.0, i.end - max(i.start, since)) for i in intervals if i.kind == "generate")
    token_s = fit_token_s(later, busy_s, spec.engine.max_running)
    written = sum(sum(session.answers) for session in later)
    return token_s, max(1.0, written * token_s / max(1e-9, busy_s))


def _timed(shard: Shard, lives: dict[str, tuple[float, float]]) -> dict[str, Timed]:
    """The sessions of a training shard, by id; of one that branched, its first trajectory."""
    if shard.stream != TRAIN:
        return {}
    found = {}
    for row in shard.sessions:
        prompts: list[int] = [0]
        answers: list[int] = []
        for index in path_to(shard, row.leaves[0]):
            span = shard.spans[index]
            if span.kind == "completion":
                answers.append(len(span.ids))
                prompts.append(0)
            else:
                prompts[-1] += len(span.ids)
        if answers and row.id in lives:
            created, ended = lives[row.id]
            first, *rest = prompts
            between = tuple(rest[: len(answers) - 1])
            found[row.id] = Timed(
                ordinal=shard.ordinal, sample=row.sample, prompt=first, answers=tuple(answers),
                observations=between, elapsed_s=ended - created,
            )  # fmt: skip
    return found


def _measured(
    run: str, spec: RunSpec, steps: Sequence[StepRecord], intervals: Sequence[Interval], rates: tuple[float, float]
) -> Measured:
    generated = [i for i in intervals if i.kind == "generate"]
    trained = [i for i in intervals if i.kind == "train"]
    if not generated or not trained:
        raise ConfigError(f"run {run} has no busy intervals of both kinds: it was made by an older release")
    token_s, batch = rates
    trainers = len(pipeline.train_nodes(spec))
    computed = [float(step.metrics["tokens_in_rows"]) / trainers for step in steps]
    beside = [float(step.metrics["seconds"]) - float(step.metrics["seconds_training"]) for step in steps]
    fixed, slope = fit_update(computed, _trained_s(trained, steps), beside)
    policy = pipeline.policy_of(spec)
    commits = sorted(step.recorded for step in steps)
    started, warm_up = commits[0], min(WARM_UP, len(commits) - 1)
    return Measured(
        run=run,
        pipeline=spec.pipeline.name,
        accumulates=policy.accumulates,
        staleness=policy.staleness,
        steps=len(steps),
        groups_per_step=spec.algorithm.groups_per_step,
        group_size=spec.algorithm.group_size,
        target_in_flight=spec.pipeline.target_in_flight,
        max_running=spec.engine.max_running,
        kv_tokens=spec.engine.kv_tokens,
        nodes=(*(MeasuredNode(id=node.id, tags=node.tags) for node in spec.nodes), *_guests(spec, generated)),
        model=json.loads((Path(spec.model.path) / "config.json").read_text()),
        dtype=spec.model.dtype,
        warm_up=warm_up,
        wall_s=commits[-1] - commits[warm_up - 1],
        token_s=token_s,
        batch=batch,
        train_token_s=slope,
        train_fixed_s=fixed,
        rollout_to_train_s=_change_s(intervals, "generate", "train", started)
        if policy.accumulates
        else _acquire_s(steps),
        train_to_rollout_s=_change_s(intervals, "train", "generate", started),
        trainer_start_s=max(0.0, min(i.start for i in trained) - min(i.start for i in generated)),
        commit_s=_commit_s(trained, steps),
        sync_s=_sync_s(generated, steps, pipeline.train_nodes(spec)) if policy.waits_for_sync else 0.0,
    )


def _guests(spec: RunSpec, generated: Sequence[Interval]) -> list[MeasuredNode]:
    """Nodes that rolled out for the run although its file does not name them (``pool.nodes: any``)."""
    found = {interval.node for interval in generated} - {node.id for node in spec.nodes}
    return [MeasuredNode(id=node, tags=frozenset({"rollout"})) for node in sorted(found)]


def _acquire_s(steps: Sequence[StepRecord]) -> float:
    """Median seconds from a claimed batch to a gang that is ready; 0 where it always was."""
    waits = [float(step.metrics.get("seconds_acquire", 0.0)) for step in steps]
    return median(waits)


def _commit_s(trained: Sequence[Interval], steps: Sequence[StepRecord]) -> float:
    """Median seconds from the end of an update's computing until it is committed."""
    ends = sorted(interval.end for interval in trained)
    since = [step.recorded - ends[n - 1] for step in steps if (n := bisect_right(ends, step.recorded))]
    return median(since or [0.0])


def _sync_s(generated: Sequence[Interval], steps: Sequence[StepRecord], trainers: Sequence[str]) -> float:
    """Median seconds from a commit until a node that does not train decodes again; the last has nothing behind it."""
    begins = sorted(interval.start for interval in generated if interval.node not in trainers)
    commits = sorted(step.recorded for step in steps)[:-1]
    until = [begins[n] - commit for commit in commits if (n := bisect_left(begins, commit)) < len(begins)]
    return median(until or [0.0])


def _trained_s(trained: Sequence[Interval], steps: Sequence[StepRecord]) -> list[float]:
    """Seconds that one node computed for each step, ahead of its batch too."""
    node = trained[0].node
    ends = sorted(step.recorded for step in steps)
    spent = [0.0] * len(ends)
    for interval in (i for i in trained if i.node == node):
        spent[min(bisect_left(ends, interval.end), len(ends) - 1)] += interval.end - interval.start
    return spent


def _change_s(intervals: Sequence[Interval], before_kind: str, after_kind: str, started: float) -> float:
    """Median seconds from the end of one activity of a node to the start of the other; 0 if there is no such change.

    Those before ``started``, when processes are started too, count only if there are no others.
    """
    by_node: dict[str, list[Interval]] = {}
    for interval in sorted(intervals, key=lambda i: i.start):
        by_node.setdefault(interval.node, []).append(interval)
    changes = [
        (before.end, max(0.0, after.start - before.end))
        for node in by_node.values()
        for before, after in pairwise(node)
        if (before.kind, after.kind) == (before_kind, after_kind)
    ]
    later = [gap for at, gap in changes if at >= started]
    return median(later or [gap for _, gap in changes] or [0.0])
