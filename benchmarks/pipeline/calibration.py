"""How well a simulation predicts live runs that it was not fitted to: all it knows is the record of another one."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

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


def calibrate(live: dict[str, Any]) -> float | None:
    """Mean relative error with which the records of :data:`FITTED` and :data:`CHANGES` predict the wall clock of the
    other live runs.

    ``live``: the result of ``run_live``. None if it does not hold these and another run.
    """
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


def compare(traces: dict[str, Trace]) -> float | None:
    """Print predictions beside what was measured; the mean relative error of those that were not fitted."""
    rates, errors = traces[FITTED], []
    measured = rates.measured.with_changes_of(traces[CHANGES].measured)
    fitted = rates.model_copy(update={"measured": measured})
    for name, trace in traces.items():
        wall_s = trace.measured.wall_s
        from_others, own = predicted(fitted, trace.measured), predicted(trace)
        known = name in (FITTED, CHANGES)
        if not known:
            errors.append(abs(from_others / wall_s - 1))
        print(
            f"{name}: live {wall_s:.1f} s; simulated from the records of {FITTED} and {CHANGES} {from_others:.1f} s "
            f"({from_others / wall_s - 1:+.1%}{', which is in sample' if known else ''}), "
            f"from its own {own:.1f} s ({own / wall_s - 1:+.1%})"
        )
    print()
    return round(fmean(errors), 4) if errors else None
