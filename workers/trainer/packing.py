"""From the trajectories of a step to the micro-batches of each rank. Deterministic; numpy only.

A micro-batch is one sequence that holds several trajectories, each shared span once: a forest written depth first. A
token's position is its depth, and it attends to its ancestors only, so its log-prob is that of the trajectory alone,
while the prompt that the samples of a group share is computed once instead of once per sample.

Every rank computes the same plan from the same trajectories, so nothing about it is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.trainer.rows import Floats, Segment, Trajectory

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WeightedTrajectory:
    """A trajectory with what the loss needs to know of its session."""

    trajectory: Trajectory
    advantage: float
    weight: float
    """Of each trained token; all weights of a step sum to 1 over ranks and micro-batches."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed sequence.

    Shape suffixes: ``T`` tokens, ``N`` trained tokens, ``K`` tokens whose next token is trained.
    """

    ids_T: Indices
    depth_T: Indices
    """Position of each token on its trajectories."""
    mask_TT: npt.NDArray[np.bool_] | None
    """True where the row's token attends to the column's; None is plain causal attention."""
    predictor_K: Indices
    """Tokens of which logits are needed, ascending."""
    predictor_N: Indices
    """Indices into ``predictor_K``."""
    target_N: Indices
    engine_logprob_N: Floats
    advantage_N: Floats
    weight_N: Floats


def plan(
    rows: Sequence[WeightedTrajectory], *, rank: int, ranks: int, micro_batch: int
) -> tuple[list[MicroBatch], int]:
    """The micro-batches of one rank, the same number on each rank, and the tokens all ranks compute.

    ``micro_batch`` trajectories share a sequence, fewer if there would not be one for each rank. Gradient reduction is
    collective, so a rank with fewer sequences takes part with micro-batches of weight 0.
    """
    size = max(1, min(micro_batch, len(rows) // ranks))
    packs = [pack(rows[n : n + size]) for n in range(0, len(rows), size)]
    shares = assign([len(p.ids_T) for p in packs], ranks)
    count = max(len(share) for share in shares)
    mine = [packs[index] for index in shares[rank]]
    return mine + [_without_weight(packs[0])] * (count - len(mine)), sum(len(p.ids_T) for p in packs)


def assign(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the sequences of each rank: the next longest goes to the rank with the fewest tokens."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in order:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    return shares


def pack(rows: Sequence[WeightedTrajectory]) -> MicroBatch:
    """Write trajectories into one sequence."""
    forest = _Forest()
    for row in rows:
        forest.add(row)
    return forest.micro_batch(plain=len(rows) == 1)


@dataclass
class _Node:
    """A segment in the sequence."""

    start: int
    depth: int
    last: int
    """Index of its last token."""
    ancestors: tuple[slice, ...]
    """Where in the sequence it and its ancestors stand."""


@dataclass
class _Forest:
    tokens: int = 0
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    nodes: dict[tuple[int, int], _Node] = field(default_factory=dict)
    predictors: list[Indices] = field(default_factory=list)
    targets: list[npt.NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)
    advantages: list[Floats] = field(default_factory=list)
    weights: list[Floats] = field(default_factory=list)

    def add(self, row: WeightedTrajectory) -> None:
        parent: _Node | None = None
        for segment in row.trajectory.segments:
            node = self.nodes.get(segment.key)
            if node is None:
                node = self.nodes[segment.key] = self._place(segment, parent)
            if len(segment.trained):
                self._train(segment, node, parent, row)
            parent = node

    def _place(self, segment: Segment, parent: _Node | None) -> _Node:
        start, length = self.tokens, len(segment.ids)
        self.ids.append(segment.ids)
        self.tokens += length
        return _Node(
            start=start,
            depth=0 if parent is None else parent.depth + parent.last - parent.start + 1,
            last=start + length - 1,
            ancestors=(*(() if parent is None else parent.ancestors), slice(start, start + length)),
        )

    def _train(self, segment: Segment, node: _Node, parent: _Node | None, row: WeightedTrajectory) -> None:
        predictor = segment.trained.astype(np.int64) + node.start - 1
        if segment.trained[0] == 0 and parent is not None:
            predictor[0] = parent.last
        self.predictors.append(predictor)
        self.targets.append(segment.ids[segment.trained])
        self.logprobs.append(segment.engine_logprobs)
        self.advantages.append(np.full(len(predictor), row.advantage, dtype=np.float32))
        self.weights.append(np.full(len(predictor), row.weight, dtype=np.float32))

    def micro_batch(self, *, plain: bool) -> MicroBatch:
        predictor_K, predictor_N = np.unique(np.concatenate(self.predictors), return_inverse=True)
        depth_T = [np.arange(node.last - node.start + 1) + node.depth for node in self.nodes.values()]
        return MicroBatch(
            ids_T=np.concatenate(self.ids).astype(np.int64),
            depth_T=np.concatenate(depth_T).astype(np.int64),
            mask_TT=None if plain else self._mask(),
            predictor_K=predictor_K,
            predictor_N=predictor_N.astype(np.int64),
            target_N=np.concatenate(self.targets).astype(np.int64),
            engine_logprob_N=np.concatenate(self.logprobs),
            advantage_N=np.concatenate(self.advantages),
            weight_N=np.concatenate(self.weights),
        )

    def _mask(self) -> npt.NDArray[np.bool_]:
        mask_TT = np.zeros((self.tokens, self.tokens), dtype=bool)
        for node in self.nodes.values():
            for ancestor in node.ancestors:
                mask_TT[node.start : node.last + 1, ancestor] = True
        return np.tril(mask_TT)  # ancestors stand in front, so this only cuts the future of a segment itself


def _without_weight(batch: MicroBatch) -> MicroBatch:
    """One token and a target of weight 0: the cheapest forward pass that takes part in the reduction."""
    return MicroBatch(
        ids_T=batch.ids_T[:1],
        depth_T=batch.depth_T[:1],
        mask_TT=None,
        predictor_K=np.zeros(1, np.int64),
        predictor_N=np.zeros(1, np.int64),
        target_N=batch.target_N[:1],
        engine_logprob_N=batch.engine_logprob_N[:1],
        advantage_N=np.zeros(1, np.float32),
        weight_N=np.zeros(1, np.float32),
    )
