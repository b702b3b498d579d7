"""From the rows of a step to the micro-batches of each rank. Deterministic; numpy only.

Every rank computes the same plan from the same rows, so nothing about it is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.trainer.rows import Floats, Row


@dataclass(frozen=True)
class WeightedRow:
    """A row with what the loss needs to know of its session."""

    row: Row
    advantage: float
    weight: float
    """Of each trained token; all weights of a step sum to 1 over ranks and micro-batches."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded to one length, and the trained tokens of all of them side by side.

    Shape suffixes: ``R`` rows, ``T`` padded length, ``N`` trained tokens, ``K`` distinct positions that predict one.
    """

    ids_RT: npt.NDArray[np.int64]
    """Padded at the end with 0."""
    positions_K: npt.NDArray[np.int64]
    """Positions of which logits are needed, ascending."""
    row_N: npt.NDArray[np.int64]
    position_N: npt.NDArray[np.int64]
    """Indices into ``positions_K``."""
    target_N: npt.NDArray[np.int64]
    engine_logprob_N: Floats
    advantage_N: Floats
    weight_N: Floats
    version_N: npt.NDArray[np.int32]


def assign(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the rows of each rank, longest first: the next longest row goes to the rank with the fewest tokens."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in order:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    return shares


def plan(rows: Sequence[WeightedRow], *, rank: int, ranks: int, micro_batch: int) -> list[MicroBatch]:
    """The micro-batches of one rank; the same number on each rank.

    Gradient reduction is collective, so a rank with fewer rows takes part with micro-batches of weight 0.
    """
    shares = assign([len(row.row.ids) for row in rows], ranks)
    count = max(-(-len(share) // micro_batch) for share in shares)
    mine = shares[rank]
    batches = [collate([rows[i] for i in mine[n : n + micro_batch]]) for n in range(0, len(mine), micro_batch)]
    return batches + [_without_weight(rows[0])] * (count - len(batches))


def collate(rows: Sequence[WeightedRow]) -> MicroBatch:
    """Pad at the end: under a causal mask no real token sees the padding, so no attention mask is needed."""
    longest = max(len(row.row.ids) for row in rows)
    ids_RT = np.zeros((len(rows), longest), dtype=np.int64)
    for n, row in enumerate(rows):
        ids_RT[n, : len(row.row.ids)] = row.row.ids
    counts = [len(row.row.trained) for row in rows]
    predicted_N = np.concatenate([row.row.trained for row in rows]).astype(np.int64) - 1
    positions_K, position_N = np.unique(predicted_N, return_inverse=True)
    row_N = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    return MicroBatch(
        ids_RT=ids_RT,
        positions_K=positions_K,
        row_N=row_N,
        position_N=position_N.astype(np.int64),
        target_N=ids_RT[row_N, predicted_N + 1],
        engine_logprob_N=np.concatenate([row.row.engine_logprobs for row in rows]),
        advantage_N=np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), counts),
        weight_N=np.repeat(np.array([row.weight for row in rows], dtype=np.float32), counts),
        version_N=np.concatenate([row.row.versions for row in rows]),
    )


def _without_weight(row: WeightedRow) -> MicroBatch:
    """Two tokens of ``row`` with weight 0: the cheapest forward pass that takes part in the reduction."""
    first = int(row.row.trained[0])
    short = Row(
        session=row.row.session,
        ids=row.row.ids[first - 1 : first + 1],
        trained=np.array([1], dtype=np.int32),
        engine_logprobs=row.row.engine_logprobs[:1],
        versions=row.row.versions[:1],
    )
    return collate([WeightedRow(short, advantage=0.0, weight=0.0)])
