"""Pipelines compared: live on two cores, and simulated from 4 to 10,000 nodes.

    make bench-pipeline                                       # everything
    python -m benchmarks.pipeline --sizes 32 --presets swe-64k --no-live
    python -m benchmarks.pipeline --live-only

Simulated cells say how every pipeline does at its own best split of the nodes, against the best static split at equal
staleness, against the peers' switching rules and against synchronous colocated training. Prints tables, which bars are
met and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.pipeline.bars import bars
from benchmarks.pipeline.calibration import calibrate
from benchmarks.pipeline.cells import cell
from benchmarks.pipeline.simulated import PRESETS, SIZES, Cell, cohort_error, shares_of, speed
from simulator.cohorts import EXACT
from storage.errors import SeamlessFlowError

PLAIN = ("colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed")


def simulated(names: Sequence[str], sizes: Sequence[int], processes: int) -> list[Cell]:
    """All cells, the small sizes first: the larger ones take their shares of train nodes from them."""
    cells: list[Cell] = []
    with ProcessPoolExecutor(processes) as pool:
        for nodes in sorted(sizes):
            found = pool.map(cell, names, [nodes] * len(names), [shares_of(cells, name) for name in names])
            for one in found:
                cells.append(one)
                print(f"{one.text()}\nsimulated in {one.seconds:.0f} s\n", flush=True)
    return cells


def live() -> dict[str, Any]:
    """The live half, and how well a simulation of it agrees."""
    module = importlib.import_module(
        "benchmarks.pipeline.live"
    )  # it brings the whole stack: only where it is asked for
    result: dict[str, Any] = module.run_live(module.LiveSettings())
    print(module.table(result) + "\n")
    try:
        found = calibrate(result)
    except SeamlessFlowError as problem:
        result["failed"]["calibration"] = str(problem)
        found = None
    errors = (None, None) if found is None else found
    return {**result, "calibration_error": errors[0], "prediction_error": errors[1]}


def headline(cells: Sequence[Cell], measured: dict[str, Any]) -> dict[str, Any]:
    """The JSON line. Parts that were not run are null."""
    runs = {name: measured[name] for name in PLAIN if name in measured}
    static = [runs[name]["wall_s"] for name in ("disaggregated", "micro_batch", "off_policy") if name in runs]
    gain = 1 - runs["multiplexed"]["wall_s"] / min(static) if static and "multiplexed" in runs else None
    return {
        "bench": "pipeline",
        "live": runs or None,
        "live_gain_vs_best_static": None if gain is None else round(gain, 4),
        "sim": {one.key: one.figures() for one in cells},
        "sim_gain_vs_best_static": {one.key: one.gains for one in cells},
        "sim_ratio_vs_sync_colocated": {one.key: round(one.ratio, 3) for one in cells},
        "calibration_error": measured.get("calibration_error"),
        "prediction_error": measured.get("prediction_error"),
        "preempt_ms_p50": measured.get("preempt_ms_p50"),
    }


def main() -> None:
    """Command line entry."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--presets", default=",".join(PRESETS))
    flags.add_argument("--sizes", default=",".join(map(str, SIZES)))
    flags.add_argument("--processes", type=int, default=2)
    flags.add_argument("--no-live", action="store_true")
    flags.add_argument("--live-only", action="store_true")
    given = flags.parse_args()
    measured = {} if given.no_live else live()
    cells: list[Cell] = []
    if not given.live_only:
        sizes = [int(size) for size in given.sizes.split(",")]
        cells = simulated(given.presets.split(","), sizes, given.processes)
        for one in cells:
            if one.nodes == EXACT:
                print(f"{one.key}: by cohorts instead, the wall clock differs by at most {cohort_error(one):.1%}")
        if max(sizes) > EXACT:
            print(f"{max(sizes)} nodes x 100 steps, multiplexed: simulated in {speed(max(sizes)):.0f} s\n")
    line = headline(cells, measured)
    print("\n".join(bars(line, cells)) + "\n")
    print(json.dumps(line))
    if measured.get("failed"):
        sys.exit(f"live runs failed: {measured['failed']}")


if __name__ == "__main__":
    main()
