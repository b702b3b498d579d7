"""From a run's busy intervals and histories to the figures of the bench. Pure, but for the reading of histories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHistory

from storage.errors import ConfigError
from storage.ledger import Interval, StepRecord

WARM_UP = 3
"""Updates before the measured time: in the first processes start, in the second costs are measured, and the third shows
how early the train nodes should be called."""
MIN_STEPS = WARM_UP + 2


@dataclass(frozen=True)
class Window:
    """Unix seconds that are looked at."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return max(self.end - self.start, 1e-9)


def steady(steps: Sequence[StepRecord]) -> Window:
    """From the end of the warm-up to the last commit but one: while the last update is made, no step is left to roll
    out for, whatever the pipeline. Raises :class:`ConfigError` for fewer than :data:`MIN_STEPS`."""
    commits = sorted(step.recorded for step in steps)
    if len(commits) < MIN_STEPS:
        raise ConfigError(f"{len(commits)} steps have no steady part: make at least {MIN_STEPS}")
    return Window(commits[WARM_UP - 1], commits[-2])


def busy_s(intervals: Iterable[Interval], window: Window) -> float:
    """Seconds of the window that any of the intervals covers."""
    spans = sorted((max(i.start, window.start), min(i.end, window.end)) for i in intervals)
    total, reached = 0.0, window.start
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def idle_fractions(intervals: Sequence[Interval], nodes: Iterable[str], window: Window) -> dict[str, float]:
    """By node: the share of the window without a generation and without an update."""
    return {n: 1 - busy_s([i for i in intervals if i.node == n], window) / window.seconds for n in nodes}


REASONS = {
    ("generate", "train"): "to training",
    ("train", "generate"): "to rollout",
    ("train", "train"): "gang waits",
    ("generate", "generate"): "no request",
}
"""What a pause of a node is, by what the node did before and behind it. ``gang waits``: for groups, or while an update
is committed; ``to rollout`` ends with the first request."""


def idle_s(intervals: Sequence[Interval], node: str, window: Window) -> dict[str, float]:
    """Idle seconds of a node in the window, by reason; a pause that reaches over its end has none and is left out."""
    mine = sorted((i for i in intervals if i.node == node), key=lambda i: i.start)
    found = dict.fromkeys(REASONS.values(), 0.0)
    last: Interval | None = None
    for interval in mine:
        if last is not None:
            pause = min(interval.start, window.end) - max(last.end, window.start)
            found[REASONS[last.kind, interval.kind]] += max(0.0, pause)
        if last is None or interval.end >= last.end:
            last = interval
    return {reason: round(seconds, 2) for reason, seconds in found.items()}


def figures(intervals: Sequence[Interval], steps: Sequence[StepRecord], nodes: Sequence[str]) -> dict[str, object]:
    """What the table and the JSON line say of one pipeline, without its warm-up."""
    window = steady(steps)
    idle = idle_fractions(intervals, nodes, window)
    later = sorted(steps, key=lambda step: step.recorded)[WARM_UP:]
    wall = later[-1].recorded - window.start
    return {
        "idle_fraction": round(fmean(idle.values()), 4),
        "idle_by_node": {node: round(value, 4) for node, value in idle.items()},
        "idle_s": {node: idle_s(intervals, node, window) for node in nodes},
        "window_s": round(window.seconds, 2),
        "tokens_per_s": round(sum(step.metrics["tokens"] for step in later) / wall, 1),
        "wall_s": round(wall, 2),
        "staleness_mean": round(fmean(step.metrics["staleness_mean"] for step in later), 4),
        "train_s": round(fmean(step.metrics["seconds"] for step in later), 2),
        "claim_s": round(fmean(step.metrics["seconds_claim"] for step in later), 2),
        "steps": len(steps),
    }


async def preemptions_ms(client: Client, run: str) -> list[float]:
    """Of each engine lease that was revoked: from the signal to the end of its supervisor, with the engine parked."""
    found = []
    query = f"WorkflowType = 'Lease' AND SfRun = '{run}' AND SfTags = 'engine'"
    async for lease in client.list_workflows(query):
        handle = client.get_workflow_handle(lease.id, run_id=lease.run_id)
        took = preemption_ms(await handle.fetch_history())
        if took is not None:
            found.append(took)
    return found


def preemption_ms(history: WorkflowHistory) -> float | None:
    """None if the lease was not revoked."""
    signalled = ended = None
    for event in history.events:
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
            if event.workflow_execution_signaled_event_attributes.signal_name == "revoke" and signalled is None:
                signalled = event.event_time.ToNanoseconds()
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_CANCELED:
            ended = event.event_time.ToNanoseconds()
    return (ended - signalled) / 1e6 if signalled is not None and ended is not None else None


def p50(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return round(median(values), 1) if values else None
