"""What activation checkpointing saves: one group trained with it and without, by plain torch in one process."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.tree.__main__ import Way, build_model
from benchmarks.tree.workload import Case, Group
from workers.trainer.recompute import recompute_layers

_CASE = Case(turns=1, siblings=8, opening=768, prompt=0, answer=96)


class Peaks(NamedTuple):
    """Above model and gradients, in MB."""

    peak_mb: float
    peak_mb_checkpointing: float
    max_grad_diff: float


def weigh_checkpointing() -> Peaks:
    model, rows = build_model(), Group(_CASE, seed=0).leaf_rows()
    kept, recomputed = Way(rows, merge=True), Way(rows, merge=True)
    kept.train(model)  # the first pass of a process takes more
    kept.weigh(model)
    recompute_layers(model, reentrant=False)
    recomputed.weigh(model)
    gap = float((kept.gradient - recomputed.gradient).abs().max())
    return Peaks(round(kept.peak_mb, 1), round(recomputed.peak_mb, 1), gap)
