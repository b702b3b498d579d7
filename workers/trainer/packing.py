"""From the trajectories of a step to the micro-batches of each rank. Deterministic; numpy only.

A micro-batch is one sequence that holds several trajectories as a :class:`~workers.trainer.tree.TokenTree`. A token's
position is its depth, and it attends to its ancestors only, so its log-prob is that of the trajectory alone, while what
trajectories begin with in common is computed once.

Every rank computes the same plan from the same trajectories, so nothing about it is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from workers.trainer.rows import Floats, Ints, Trajectory
from workers.trainer.tree import Indices, TokenTree


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
    end_T: Indices
    """Token q attends to token k if ``k <= q < end_T[k]``."""
    predictor_K: Indices
    """Tokens of which logits are needed, ascending."""
    predictor_N: Indices
    """Indices into ``predictor_K``: where trajectories part, one token predicts the next of each."""
    target_N: Indices
    current_N: npt.NDArray[np.bool_] | None = None
    """Whether the weights before the batch sampled the token's whole turn, on whose KV it leans; None: to be told from
    ``version_N`` alone."""
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

    @property
    def tokens(self) -> int:
        return len(self.ids_T)


def plan(
    rows: Sequence[WeightedTrajectory], *, rank: int, ranks: int, row_tokens: int, merge: bool = True
) -> tuple[list[MicroBatch], int]:
    """The micro-batches of one rank, the same number on each rank, and the tokens all ranks compute.

    A micro-batch has at most ``row_tokens`` tokens, unless one trajectory alone has more. ``merge=False`` computes
    each trajectory in full. Gradient reduction is collective, so a rank with fewer micro-batches than others takes part
    with ones of weight 0.
    """
    shares = _shares(rows, ranks, row_tokens, merge)
    idle = max(len(share) for share in shares) - len(shares[rank])
    tokens = sum(batch.tokens for share in shares for batch in share)
    return shares[rank] + [without_weight(shares[0][0])] * idle, tokens


def plan_all(
    rows: Sequence[WeightedTrajectory], *, ranks: int, row_tokens: int, merge: bool = True
) -> list[MicroBatch]:
    """The micro-batches of every rank that :func:`plan` gives weight, rank by rank."""
    return [batch for share in _shares(rows, ranks, row_tokens, merge) for batch in share]


def _shares(rows: Sequence[WeightedTrajectory], ranks: int, row_tokens: int, merge: bool) -> list[list[MicroBatch]]:
    """Of the best plan, by rank."""
    tree = TokenTree([row.trajectory.inputs for row in rows], merge=merge)
    plans = []
    for budget in _budgets(len(tree.ids_T), ranks, row_tokens):
        packs = [pack([rows[path] for path in paths], merge=merge) for paths in tree.cut(budget)]
        plans.append([[packs[i] for i in share] for share in assign([p.tokens for p in packs], ranks)])
    loads = [[sum(p.tokens for p in share) for share in shares] for shares in plans]
    best = min(range(len(plans)), key=lambda n: (max(loads[n]), sum(loads[n])))
    return plans[best]


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


def pack(rows: Sequence[WeightedTrajectory], *, merge: bool = True) -> MicroBatch:
    """Write trajectories into one sequence."""
    tree = TokenTree([row.trajectory.inputs for row in rows], merge=merge)
    predictors = [tree.positions(n)[row.trajectory.trained_at - 1] for n, row in enumerate(rows)]
    predictor_K, predictor_N = np.unique(np.concatenate(predictors), return_inverse=True)
    return MicroBatch(
        ids_T=tree.ids_T.astype(np.int64),
        depth_T=tree.depth_T,
        end_T=tree.end_T,
        predictor_K=predictor_K,
        predictor_N=predictor_N,
        target_N=np.concatenate([row.trajectory.ids[row.trajectory.trained_at] for row in rows]).astype(np.int64),
        **vars(TokenColumns.concatenate([row.columns for row in rows])),
    )


def _budgets(tokens: int, ranks: int, row_tokens: int) -> list[int]:
    """Row sizes to try: ranks wait for the slowest, so with several of them full rows are not always best."""
    rounds = -(-tokens // (ranks * row_tokens))
    share = -(-tokens // (ranks * rounds))
    tried = [share + share * extra // 16 for extra in (0, 1, 2, 4, 8)] if ranks > 1 else []
    return [row_tokens, *(budget for budget in tried if budget < row_tokens)]


def without_weight(batch: MicroBatch) -> MicroBatch:
    """One token and a target of weight 0: the cheapest forward pass that takes part in the reduction."""
    columns = {f.name: getattr(batch, f.name)[:1] for f in fields(TokenColumns)}
    columns |= {"token_N": np.full(1, -1), "advantage_N": np.zeros(1, np.float32), "weight_N": np.zeros(1, np.float32)}
    return replace(
        batch,
        ids_T=batch.ids_T[:1],
        depth_T=np.zeros(1, np.int64),
        end_T=np.ones(1, np.int64),
        predictor_K=np.zeros(1, np.int64),
        predictor_N=np.zeros(1, np.int64),
        target_N=batch.target_N[:1],
        **columns,
    )
