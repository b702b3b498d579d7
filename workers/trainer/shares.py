"""The part of a batch that one rank computes when models have nodes of their own, and what all ranks found as a column.

A model apart computes the very micro-batches that the trainer's ranks would, so its numbers are theirs, to the bit on
like machines. They are dealt out to the gangs that share a batch, and to the ranks of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from storage.columns import Column
from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.messages import ColumnRequest
from workers.trainer.packing import MicroBatch, assign, plan_all, without_weight
from workers.trainer.rows import Floats
from workflows.scheduling.pipeline import trainer_ranks
from workflows.spec import RunSpec


def share_of(batch: Batch, spec: RunSpec, backend: TrainingBackend, request: ColumnRequest) -> list[MicroBatch]:
    """This rank's micro-batches: as many as every other rank of the gang has, for a pass may be collective."""
    every = [
        micro
        for part in batch.minibatches
        for micro in plan_all(
            part,
            ranks=trainer_ranks(spec),
            row_tokens=spec.trainer.row_tokens if backend.packs else 1,
            merge=spec.trainer.rows == "tree" and backend.packs,
        )
    ]
    gang = backend.world_size
    shares = assign([micro.tokens for micro in every], request.shares * gang)[request.share * gang :][:gang]
    idle = max(map(len, shares)) - len(shares[backend.rank])
    return [every[i] for i in shares[backend.rank]] + [without_weight(micro) for micro in every[:1] * idle]


def column_of(
    name: str, batch: Batch, mine: Sequence[MicroBatch], said: Sequence[Floats], backend: TrainingBackend
) -> Column:
    """What all ranks of a gang found, by token in the batch's order."""
    token_N = np.concatenate([np.empty(0, np.int64), *(micro.token_N for micro in mine)])
    value_N = np.concatenate([np.empty(0, np.float32), *said])
    known_N: npt.NDArray[np.bool_] = token_N >= 0
    gathered = backend.gather((token_N[known_N], value_N[known_N]))
    token_N, value_N = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    order = np.argsort(token_N)
    return Column(name, batch.places()[token_N[order]], value_N[order])
