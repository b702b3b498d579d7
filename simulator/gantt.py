"""A picture of who did what when."""

from __future__ import annotations

from pathlib import Path

from simulator.measure import Activity, Result

COLOURS: dict[Activity, str] = {
    "decode": "#4c9f70",
    "train": "#3a6ea5",
    "sync": "#e9c46a",
    "switch": "#e76f51",
    "rollout_idle": "#d9ead3",
    "train_idle": "#d0deee",
    "down": "#9e9e9e",
}
"""Idle is the pale shade of what a node would do."""
MOST_NODES = 64
INCHES_A_NODE = 0.22


def draw(result: Result, path: Path, title: str = "") -> None:
    """Write a Gantt picture, SVG or PNG by the name's end, of the first nodes.

    ``result`` is of a scenario with ``segments``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    nodes = sorted({segment.node for segment in result.segments})[:MOST_NODES]
    rows = {node: len(nodes) - 1 - i for i, node in enumerate(nodes)}
    figure = Figure(figsize=(12, 1.6 + INCHES_A_NODE * len(nodes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for activity, colour in COLOURS.items():
        for node, row in rows.items():
            spans = [(s.start, s.end - s.start) for s in result.segments if (s.node, s.activity) == (node, activity)]
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=colour)
    for step in result.steps:
        axes.axvline(step.committed_at, color="black", linewidth=0.5)
    axes.set_yticks(list(rows.values()), list(rows), fontsize=6)
    axes.set_xlabel("seconds; a line is an update")
    axes.set_title(title or result.pipeline)
    shown = [(a, c) for a, c in COLOURS.items() if result.seconds.get(a)]
    axes.legend(
        handles=[Patch(facecolor=c, label=a.replace("_", " ")) for a, c in shown],
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(COLOURS), frameon=False,
    )  # fmt: skip
    figure.savefig(path)
