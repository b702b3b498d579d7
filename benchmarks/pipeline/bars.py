"""What the bench is to show, and whether it did: a line for each bar, with the figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pipeline.simulated import OURS, SEARCHED, Cell

LIVE_IDLE, SIMULATED_IDLE = 0.03, 0.01
LARGE = 32
"""Nodes from which on the simulated idle time counts."""
GAIN = 0.10
GAINING = ("math-20k-thinking", "math-20k-instruct", "drift-20k")
"""Long tails and drifting lengths."""
SPEED_UPS = {"math-20k-instruct": 2.0, "swe-64k": 1.55}
"""Over synchronous colocated training, at 64 nodes."""
CALIBRATION, PREEMPT_MS = 0.10, 100.0


def bars(line: dict[str, Any], cells: Sequence[Cell]) -> list[str]:
    """``line``: the bench's JSON line. Parts that were not run have no bar."""
    return [f"{'met' if met else 'MISSED':<6}  {what}" for met, what in (*_live(line), *_simulated(cells))]


def _live(line: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if OURS in (line["live"] or {}):
        idle = line["live"][OURS]["idle_fraction"]
        yield idle <= LIVE_IDLE, f"live, {OURS}: idle {idle:.1%}, at most {LIVE_IDLE:.0%}"
    if (gain := line["live_gain_vs_best_static"]) is not None:
        yield gain > 0, f"live, {OURS} against the best pipeline with fixed roles: {gain:+.1%}, better"
    if (error := line["calibration_error"]) is not None:
        yield (
            error <= CALIBRATION,
            f"simulated from a live run's own record: {error:.1%} off, at most {CALIBRATION:.0%}",
        )
    if (took := line["preempt_ms_p50"]) is not None:
        yield took <= PREEMPT_MS, f"pre-empt signal to engine stopped, p50: {took:g} ms, at most {PREEMPT_MS:g}"


def _simulated(cells: Sequence[Cell]) -> Iterator[tuple[bool, str]]:
    for cell in cells:
        idle = cell.choices[OURS].result.idle_fraction
        if cell.nodes >= LARGE:
            yield idle <= SIMULATED_IDLE, f"{cell.key}, {OURS}: idle {idle:.1%}, at most {SIMULATED_IDLE:.0%}"
        if cell.name in GAINING and LARGE <= cell.nodes <= SEARCHED:
            gains = cell.gains
            yield (
                gains["strongest"] >= GAIN,
                f"{cell.key}: {gains['strongest']:+.1%} against the best static split, which itself idles "
                f"{cell.choices[cell.best_static].result.idle_fraction:.1%}, and {gains['filling']:+.1%} against that "
                f"of off-policy filling; at least {GAIN:.0%}",
            )
        if cell.name in SPEED_UPS and cell.nodes == SEARCHED:
            asked = SPEED_UPS[cell.name]
            yield cell.ratio >= asked, f"{cell.key}: {cell.ratio:.2f} times synchronous colocated, at least {asked:g}"
