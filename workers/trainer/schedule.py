"""The learning rate over a run, as a factor of the run file's for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

from workflows.spec import RunSpec


def learning_rate_factor(spec: RunSpec) -> Callable[[int], float]:
    """What optimizer step n, counted from 0, multiplies the learning rate by.

    With ``w`` steps of warm-up it is (n + 1) / (w + 1), so no step is lost to a rate of 0. Then it is 1, or falls to 0
    at the end of the schedule: ``linear`` 1 - p, ``cosine`` (1 + cos(pi p)) / 2, where p is the part that is behind.
    """
    trainer, per_update = spec.trainer, spec.algorithm.minibatches * spec.algorithm.epochs
    warmup = trainer.warmup_steps * per_update
    total = (trainer.schedule_steps or spec.pipeline.steps) * per_update

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        part = min((step - warmup) / max(total - warmup, 1), 1.0)
        match trainer.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - part
            case "cosine":
                return (1.0 + math.cos(math.pi * part)) / 2

    return factor
