"""How well a simulation agrees with live runs: with that whose record it has, and with others it was not fitted to."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cli import stack
from cli.trace import export
from simulator.lending import Hysteresis, JustInTime
from simulator.run import Scenario, simulate
from simulator.trace import Measured, Trace
from workers.cluster import StateFolder
from workflows.scheduling.pipeline import policy
from workflows.spec import PipelineSpec

FITTED = "off_policy"
"""The run whose record is used: one node decodes and the other trains all the time, so both rates are measured well."""
CHANGES = "colocated"
"""The run whose changes of role and loads of weights are used: the other one has none, and this one little else."""
ON_POLICY = ("colocated", "disaggregated", "micro_batch")


def replayed(trace: Trace, like: Measured | None = None) -> Scenario:
    """The run that the trace is of, to be simulated: its groups in their order on its nodes. ``like``: another run,
    whose pipeline and number of steps are taken instead."""
    seen, asked = trace.measured, like or trace.measured
    bound = None if asked.pipeline in ON_POLICY else asked.staleness
    spec = {"name": asked.pipeline, "steps": asked.steps, "max_staleness": bound, "accumulate": asked.accumulates}
    return Scenario(
        policy=policy(PipelineSpec.model_validate(spec), seen.groups_per_step),
        cluster=seen.cluster(),
        model=seen.model_cost,
        workload=trace.workload,
        group_size=seen.group_size,
        target_in_flight=seen.target_in_flight,
        lending=JustInTime if asked.accumulates else Hysteresis,
        warm_up=asked.warm_up,
    )


def predicted(trace: Trace, like: Measured | None = None) -> float:
    """Wall seconds of a run as simulated from a trace."""
    return simulate(replayed(trace, like)).wall_s


class Agreement(NamedTuple):
    """Mean relative errors of the wall clock."""

    calibrated: float
    """Of each run as simulated from its own record."""
    predicted: float
    """Of the runs that are neither :data:`FITTED` nor :data:`CHANGES`, as simulated from the records of these two."""


def calibrate(live: dict[str, Any]) -> Agreement | None:
    """``live``: the result of ``run_live``. None if it does not hold these two runs and another."""
    record = live.get("record")
    if not record or not {FITTED, CHANGES} < set(record["runs"]):
        return None
    state = StateFolder(Path(record["state"]))
    stack.up(state, None, say=lambda line: None)  # the object store has the shards
    try:
        traces = {name: export(state, run) for name, run in record["runs"].items()}
    finally:
        stack.down(state)
    return compare(traces)


def compare(traces: dict[str, Trace]) -> Agreement:
    """Print simulated seconds beside those measured."""
    rates, owns, others = traces[FITTED], [], []
    measured = rates.measured.with_changes_of(traces[CHANGES].measured)
    fitted = rates.model_copy(update={"measured": measured})
    for name, trace in traces.items():
        wall_s = trace.measured.wall_s
        from_others, own = predicted(fitted, trace.measured), predicted(trace)
        known = name in (FITTED, CHANGES)
        owns.append(abs(own / wall_s - 1))
        if not known:
            others.append(abs(from_others / wall_s - 1))
        print(
            f"{name}: live {wall_s:.1f} s; simulated from the records of {FITTED} and {CHANGES} {from_others:.1f} s "
            f"({from_others / wall_s - 1:+.1%}{', which is in sample' if known else ''}), "
            f"from its own {own:.1f} s ({own / wall_s - 1:+.1%})"
        )
    print()
    return Agreement(round(fmean(owns), 4), round(fmean(others), 4))
