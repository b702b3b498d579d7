"""How well a simulation of the live runs agrees with them: sessions and rates from their own records, nothing else."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from cli import stack
from cli.trace import export
from simulator.run import Scenario, simulate
from simulator.trace import Trace
from workers.cluster import StateFolder
from workflows.scheduling.pipeline import policy
from workflows.spec import PipelineSpec

ON_POLICY = ("colocated", "disaggregated", "micro_batch")


def replayed(trace: Trace) -> Scenario:
    """The run that the trace is of, to be simulated: its groups in their order on its nodes."""
    seen = trace.measured
    bound = None if seen.pipeline in ON_POLICY else seen.staleness
    spec = PipelineSpec.model_validate({"name": seen.pipeline, "steps": seen.steps, "max_staleness": bound})
    return Scenario(
        policy=policy(spec, seen.groups_per_step),
        cluster=seen.cluster(),
        model=seen.model_cost,
        workload=trace.workload,
        group_size=seen.group_size,
        target_in_flight=seen.target_in_flight,
    )


def compare(trace: Trace) -> tuple[float, float]:
    """Wall seconds of the run: simulated, live."""
    return simulate(replayed(trace)).wall_s, trace.measured.wall_s


def calibrate(live: dict[str, Any]) -> float | None:
    """Mean relative error over the live runs, each simulated with what was measured in all of them together.

    ``live``: the result of ``run_live``. Sessions are each run's own; rates are means over the runs, so no run is
    explained by its own speed alone. None if no run is recorded.
    """
    record = live.get("record")
    if not record:
        return None
    state = StateFolder(Path(record["state"]))
    stack.up(state, None, say=lambda line: None)  # the object store has the shards
    try:
        traces = {name: export(state, run) for name, run in record["runs"].items()}
    finally:
        stack.down(state)
    rates = {
        key: fmean(getattr(trace.measured, key) for trace in traces.values()) for key in ("token_s", "train_token_s")
    }
    errors = []
    for name, trace in traces.items():
        own, wall_s = compare(trace)
        shared, _ = compare(trace.model_copy(update={"measured": trace.measured.model_copy(update=rates)}))
        errors.append(abs(shared / wall_s - 1))
        print(
            f"{name}: live {wall_s:.1f} s, simulated {shared:.1f} s ({shared / wall_s - 1:+.1%}); "
            f"with the run's own rates {own:.1f} s ({own / wall_s - 1:+.1%})"
        )
    print()
    return round(fmean(errors), 4)
