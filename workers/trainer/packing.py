"""From the trajectories of a step to the micro-batches of each rank. Deterministic; numpy only.

A micro-batch is one sequence that holds several trajectories, each shared span once: a forest written depth first. A
token's position is its depth, and it attends to its ancestors only, so its log-prob is that of the trajectory alone,
while the prompt that the samples of a group share is computed once instead of once per sample.

Every rank computes the same plan from the same trajectories, so nothing about it is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from workers.trainer.rows import Floats, Ints, Segment, Trajectory

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """What the loss knows of trained tokens, one array each; ``N`` of them, in the order in which they are packed."""

    token_N: Indices
    """Index of the token among all trained tokens of the batch; -1 for padding."""
    engine_logprob_N: Floats
    """As recorded at sampling."""
    version_N: Ints
    """Weight version that made the token."""
    sequence_N: Indices
    """Sequence (session or turn) the token belongs to, counted over the batch: for ratios of whole sequences."""
    advantage_N: Floats
    weight_N: Floats
    """All weights of an optimizer step sum to 1 over ranks and micro-batches."""

    @staticmethod
    def concatenate(parts: Sequence[TokenColumns]) -> TokenColumns:
        columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(TokenColumns)}
        return TokenColumns(**columns)


@dataclass(frozen=True)
class WeightedTrajectory:
    """A trajectory with what the loss needs to know of its trained tokens, in their order on it."""

    trajectory: Trajectory
    columns: TokenColumns


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenColumns):
    """One packed sequence.

    Shape suffixes: ``T`` tokens, ``N`` trained tokens, ``K`` tokens whose next token is trained. Packing fills all but
    the columns with a default, which are filled where the run's algorithm needs them.
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
    old_logprob_N: Floats | None = None
    """Under the weights before the batch's first optimizer step; None: those that compute the loss are these."""
    sequence_log_ratio_N: Floats | None = None
    """Mean over the token's sequence of current - old log-prob; None: 0."""
    importance_N: Floats | None = None
    """Off-policy weight of the token; None: computed from the token alone."""
    reference_logprob_N: Floats | None = None
    value_N: Floats | None = None
    """Of the state in front of the token, by the critic before the batch's first optimizer step."""
    return_N: Floats | None = None
    """What the critic is trained towards."""


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
    columns: list[TokenColumns] = field(default_factory=list)

    def add(self, row: WeightedTrajectory) -> None:
        self.columns.append(row.columns)
        parent: _Node | None = None
        for segment in row.trajectory.segments:
            node = self.nodes.get(segment.key)
            if node is None:
                node = self.nodes[segment.key] = self._place(segment, parent)
            if len(segment.trained):
                self._train(segment, node, parent)
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

    def _train(self, segment: Segment, node: _Node, parent: _Node | None) -> None:
        predictor = segment.trained.astype(np.int64) + node.start - 1
        if segment.trained[0] == 0 and parent is not None:
            predictor[0] = parent.last
        self.predictors.append(predictor)
        self.targets.append(segment.ids[segment.trained])

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
            **vars(TokenColumns.concatenate(self.columns)),
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
        token_N=np.full(1, -1, np.int64),
        engine_logprob_N=batch.engine_logprob_N[:1],
        version_N=batch.version_N[:1],
        sequence_N=batch.sequence_N[:1],
        advantage_N=np.zeros(1, np.float32),
        weight_N=np.zeros(1, np.float32),
    )
