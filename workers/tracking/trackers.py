"""Where a run's figures are shown outside of our own pages: TensorBoard event files, Weights & Biases.

A tracker is told each figure once in the usual case, and again after a crash between telling it and noting that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workflows.spec import RunSpec, WandbSpec

Figures = Mapping[str, float]
STEP = "step"


class Tracker(Protocol):
    """One place that shows figures; any error it raises is the follower's to log."""

    def log(self, figures: Figures, *, step: int, at: float) -> None:
        """Show ``figures`` (name as in docs/metrics.md) of ``step``, made at ``at`` (unix seconds)."""

    def close(self) -> None:
        """Write out what is pending."""


class TensorBoard:
    """Event files in a folder, readable by ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # loads slowly, and only where a run is tracked

        self._writer = SummaryWriter(str(folder), flush_secs=5)

    def log(self, figures: Figures, *, step: int, at: float) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of a Weights & Biases project; it goes on under the same id after a restart.

    The key is the control worker's ``WANDB_API_KEY``: it stands in no run file. Figures carry their own step, so
    a step that is made again after a rewind is accepted, which W&B's counter would refuse.
    """

    def __init__(self, run: str, spec: WandbSpec, config: Mapping[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            mode=spec.mode,
            id=run,
            name=run,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        self._run.define_metric("*", step_metric=STEP)

    def log(self, figures: Figures, *, step: int, at: float) -> None:
        self._run.log({**figures, STEP: step})

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class TrackerKind:
    """A tracker that a run file can ask for; ``connect`` makes it in a folder of its own."""

    name: str
    connect: Callable[[Path], Tracker]


def trackers_of(spec: RunSpec) -> tuple[TrackerKind, ...]:
    """The trackers that ``spec`` asks for."""
    kinds = []
    if spec.trackers.tensorboard:
        kinds.append(TrackerKind("tensorboard", TensorBoard))
    if (wandb := spec.trackers.wandb) is not None:
        config = spec.model_dump(mode="json")
        kinds.append(TrackerKind("wandb", lambda folder: Wandb(spec.run, wandb, config, folder)))
    return tuple(kinds)
