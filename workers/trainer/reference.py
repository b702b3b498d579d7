"""A rank of the reference: what a model that never changes says of a batch's tokens, written as a column.

It computes the very micro-batches that the trainer's ranks would, so its numbers are theirs, to the bit on like
machines. They are dealt out to the gangs that share a batch, and to the ranks of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.columns import COLUMN_OF, Column, find_column, key_for, write_column
from storage.objects import ObjectStore
from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.launch import Launch
from workers.trainer.messages import ColumnRef, ColumnRequest
from workers.trainer.packing import MicroBatch, assign, plan_all, without_weight
from workers.trainer.rank import BatchReader, Rank
from workers.trainer.rows import Floats
from workflows.scheduling.pipeline import trainer_ranks

COLUMN = COLUMN_OF["reference"]


class Reference(Rank):
    """See the module. A share that is written is not computed again."""

    def __init__(self, launch: Launch, backend: TrainingBackend, read: BatchReader, store: ObjectStore) -> None:
        super().__init__(launch, backend, read)
        self._store = store

    def columns(self, request: ColumnRequest) -> ColumnRef:
        """Log-probs of this share of the batch's trained tokens at the sampling temperature.

        Raises :class:`StorageError` or :class:`IntegrityError` if the batch cannot be read, :class:`GangLost` or
        :class:`OutOfMemory` if it cannot be computed.
        """
        self._must_have_device()
        self.progress.step = request.step
        key = key_for(self._spec.run, COLUMN, request.manifest_digest, request.share, request.shares)
        digest = self._together.on_rank_0("look for a written column", lambda: find_column(self._store, key))
        if digest is None:
            batch = self._together.everywhere("read the batch", lambda: self._read(request))
            self.progress.phase = "computing"
            column = self._irrevocably("compute a column", lambda: self._column(batch, request))
            self.progress.phase = "ready"
            digest = self._together.on_rank_0("write a column", lambda: write_column(self._store, key, column))
        return ColumnRef(name=COLUMN, key=key, digest=digest)

    def _column(self, batch: Batch, request: ColumnRequest) -> Column:
        mine = self._share(batch, request)
        said = self._backend.reference_logprobs(self._at.over(mine), batch.temperature)
        token_N, value_N = _joined([b.token_N for b in mine], np.int64), _joined(said, np.float32)
        known_N = token_N >= 0
        gathered = self._backend.gather((token_N[known_N], value_N[known_N]))
        token_N, value_N = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
        order = np.argsort(token_N)
        return Column(COLUMN, batch.places()[token_N[order]], value_N[order])

    def _share(self, batch: Batch, request: ColumnRequest) -> list[MicroBatch]:
        """This rank's micro-batches: as many as every other rank of the gang has, for a pass may be collective."""
        trainer, packs = self._spec.trainer, self._backend.packs
        every = [
            micro
            for part in batch.minibatches
            for micro in plan_all(
                part,
                ranks=trainer_ranks(self._spec),
                row_tokens=trainer.row_tokens if packs else 1,
                merge=trainer.rows == "tree" and packs,
            )
        ]
        gang = self._backend.world_size
        shares = assign([micro.tokens for micro in every], request.shares * gang)[request.share * gang :][:gang]
        idle = max(map(len, shares)) - len(shares[self._backend.rank])
        return [every[i] for i in shares[self._backend.rank]] + [without_weight(micro) for micro in every[:1] * idle]


def _joined(parts: Sequence[np.ndarray[tuple[int], np.dtype[np.generic]]], kind: type[np.generic]) -> Floats:
    return np.concatenate([np.empty(0, kind), *parts])
