"""Notices that a batch cannot be trained because a number is not finite.

Numbers are looked at before each optimizer step, so that one which is not finite changes nothing. All ranks see the
same sums and so come to the same verdict; what a rank knows alone, its micro-batches, they tell each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.objective import StepSums
from workers.trainer.packing import MicroBatch

_NAMED = 4
"""Sessions and micro-batches that a message names; of more it says how many."""


class NotFinite(Exception):
    """A loss or gradient of a batch is not finite. ``str`` says which, and which micro-batches and sessions made it.

    Equal on all ranks. Nothing is accumulated any more.
    """

    def __init__(self, what: str, sessions: frozenset[str] = frozenset(), *, alone: bool = False) -> None:
        super().__init__(what)
        self.sessions = sessions
        """Those that made it; empty if it cannot be told."""
        self.alone = alone
        """Whether other sessions of the batch are in order, so that it can be trained without these."""


class Guard:
    """Judges the sums and norms of one batch; all methods are collective."""

    def __init__(self, batch: Batch, backend: TrainingBackend) -> None:
        self._batch, self._backend = batch, backend

    def check_loss(self, sums: StepSums, batches: Sequence[MicroBatch]) -> None:
        """Raise :class:`NotFinite`, with nothing accumulated, if no optimizer step can be made on ``sums``."""
        if sums.finite:
            return
        self._backend.forget()
        broken = sums.broken - {-1}
        what = f"the loss of {_tokens(broken)}, or its gradient," if broken else f"the sum of the loss, {sums.loss},"
        raise _not_finite(what, self._batch, broken, self._where(broken, batches))

    def check_norm(self, norm: float, batches: Sequence[MicroBatch], of: str = "the gradient's norm") -> None:
        """The same for the gradient's norm: a back end makes no step on one that is not finite."""
        if math.isfinite(norm):
            return
        where = self._where(frozenset(range(len(self._batch.evidence.session_N))), batches)
        raise _not_finite(f"{of}, {norm} though every token's loss is finite,", self._batch, frozenset(), where)

    def check_column(self, name: str, found_M: Tensor, batches: Sequence[MicroBatch]) -> None:
        """The same for what a model says of each token, before the first optimizer step."""
        broken = frozenset((~found_M.isfinite()).nonzero()[:, 0].tolist())
        if broken:
            self._backend.forget()
            what = f"{name.removesuffix('_N').replace('_', ' ')} of {_tokens(broken)}"
            raise _not_finite(what, self._batch, broken, self._where(broken, batches))

    def _where(self, broken: frozenset[int], batches: Sequence[MicroBatch]) -> list[str]:
        """Micro-batches of all ranks that hold such tokens."""
        rank = self._backend.rank
        mine = [
            f"micro-batch {number} of {len(batches)} on rank {rank} ({batch.tokens} tokens)"
            for number, batch in enumerate(batches, start=1)
            if not broken.isdisjoint(batch.token_N.tolist())
        ]
        return list(itertools.chain.from_iterable(self._backend.gather(mine)))


def _not_finite(what: str, batch: Batch, broken: frozenset[int], where: Sequence[str]) -> NotFinite:
    evidence = batch.evidence
    turns: dict[str, list[int]] = {}
    for token in sorted(broken):
        name, turn = evidence.names[int(evidence.session_N[token])], int(evidence.turn_N[token])
        turns.setdefault(name, []).append(turn)
    trained = len(set(evidence.session_N.tolist()))
    parts = [f"{what} is not finite"]
    if where:
        parts.append(f"in {_some(where[:_NAMED], len(where))}")
    if turns:
        every = "every session of the batch, " if len(turns) == trained > 1 else ""
        described = [f"{name} (trained generation {_numbers(batch, turns[name])})" for name in list(turns)[:_NAMED]]
        parts.append(f"made by {every}session {_some(described, len(turns))}")
    return NotFinite(", ".join(parts), frozenset(turns), alone=0 < len(turns) < trained)


def _numbers(batch: Batch, turns: Sequence[int]) -> str:
    """Places of generations among those that their session trains, counted from 1."""
    turn_N, session_N = batch.evidence.turn_N, batch.evidence.session_N
    session = session_N[turn_N == turns[0]][0]
    order = sorted(set(turn_N[session_N == session].tolist()))
    return ", ".join(str(order.index(turn) + 1) for turn in sorted(set(turns)))


def _tokens(broken: frozenset[int]) -> str:
    return f"{len(broken)} token{'s' if len(broken) != 1 else ''}"


def _some(names: Sequence[str], of: int) -> str:
    return ", ".join(names) + (f" and {of - len(names)} more" if of > len(names) else "")


def advice(found: NotFinite, on_bad_batch: str) -> str:
    """What a human can do about a batch that was not trained."""
    if not found.alone:
        return "It is not single samples: look at the weights, the learning rate and the loss"
    if on_bad_batch == "skip":
        return "The first update cannot be undone to go on without them: set algorithm.minibatches and epochs to 1"
    return "With trainer.on_bad_batch: skip the step is made without these samples"
