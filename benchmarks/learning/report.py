"""What is said of the runs: a table, a verdict, a picture and the JSON line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning.curves import SIGMAS, Mean, Row, compare, over_seeds
from benchmarks.learning.plan import SETTINGS, TASKS

COLOURS = {"on_policy": "#3a6ea5", "corrected": "#4c9f70", "uncorrected": "#e76f51", "ppo": "#8e6bb0"}
REFERENCE, CORRECTED = "on_policy", "corrected"


def first(row: Row) -> Mean:
    return row.first(TASKS[row.task].first)


def end(row: Row) -> Mean:
    return row.end(TASKS[row.task].last)


def table(rows: Sequence[Row]) -> str:
    """A line a run."""
    head = f"{'task':<8} {'setting':<12} {'seed':>4} {'first':>14} {'last':>14} {'staleness':>10} {'wall s':>7}"
    return "\n".join([head, *map(line, rows)])


def line(r: Row) -> str:
    """Its line in the table."""
    where = f"{r.task:<8} {r.setting:<12} {r.seed:>4}"
    return f"{where} {first(r)!s:>14} {end(r)!s:>14} {r.staleness_mean:>10.2f} {r.wall_s:>7.0f}"


def ends(rows: Sequence[Row], task: str) -> dict[str, Mean]:
    """By setting: the end over all its seeds."""
    found: dict[str, list[Mean]] = defaultdict(list)
    for row in rows:
        if row.task == task:
            found[row.setting].append(end(row))
    return {setting: over_seeds(found[setting]) for setting in SETTINGS if setting in found}


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Per task: each setting's end against that on policy. The one that is judged is the corrected."""
    lines = []
    for task in TASKS:
        found = ends(rows, task)
        for setting, value in found.items():
            if setting != REFERENCE and REFERENCE in found:
                lines.append(_verdict(task, setting, value, found[REFERENCE]))
    return lines


def _verdict(task: str, setting: str, value: Mean, reference: Mean) -> str:
    found = compare(reference, value)
    says = "within" if found.within_noise else "NOT within"
    judged = "" if setting == CORRECTED else " (for contrast)"
    return (
        f"{task}: {setting} ends at {value}, on policy at {reference}: {found.difference:+.3f}, {says} the noise of "
        f"{found.noise:.3f} ({SIGMAS:g} standard errors){judged}"
    )


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON line."""
    return {
        "bench": "learning",
        "rows": [
            {
                "task": row.task,
                "setting": row.setting,
                "seed": row.seed,
                "reward_first": round(first(row).value, 4),
                "reward_last": round(end(row).value, 4),
            }
            for row in rows
        ],
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the curves as PNG: a panel a task, a colour a setting; thin lines are seeds, the thick one their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = [name for name in TASKS if any(row.task == name for row in rows)]
    figure = Figure(figsize=(5.5 * len(tasks), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for column, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), column + 1)
        for setting, colour in COLOURS.items():
            curves = [row.curve for row in rows if (row.task, row.setting) == (task, setting)]
            if not curves:
                continue
            for curve in curves if len(curves) > 1 else ():
                axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.6, alpha=0.4)
            mean = [fmean(step) for step in zip(*curves, strict=True)]
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=2, label=setting.replace("_", " "))
        axes.set(title=task, xlabel="update", ylabel="mean reward", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)
