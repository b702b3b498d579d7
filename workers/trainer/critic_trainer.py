"""A rank of a critic that has nodes of its own: it gives values, and later learns from the returns they led to.

Its updates are the trainer's but for what they train: read batch, values and returns; train; save; seal. It publishes
nothing, and its checkpoints, in a folder of their own, are committed with the policy's of the same step.
"""

from __future__ import annotations

from functools import partial

from storage.columns import COLUMN_OF, RETURN
from storage.errors import FencedError
from workers.trainer.batch import Batch
from workers.trainer.checkpoint import Sealed
from workers.trainer.messages import ColumnRef, ColumnRequest, UpdateRequest, UpdateResult
from workers.trainer.step import Trained, Work
from workers.trainer.trainer import Trainer


class CriticTrainer(Trainer):
    """See the module."""

    def columns(self, request: ColumnRequest) -> ColumnRef:
        """Values by the critic before the step. Raises :class:`FencedError` if it has made that step, or lacks one."""
        if request.step != self.progress.version:
            raise FencedError(
                f"values of step {request.step} are asked for, but the critic holds version {self.progress.version}: "
                f"restart its gang from the checkpoint of version {request.step}"
            )
        return super().columns(request)

    def _stands_at(self) -> str:
        return self._parent()[:16] or "initial"

    def _needed(self) -> set[str]:
        return {COLUMN_OF["critic"], RETURN}

    def _make_steps(self, request: UpdateRequest, batch: Batch) -> Trained:
        work = partial(Work, batch, self._spec.algorithm, self._backend, self._plan, self._at)
        return work().run_critic() if batch.minibatches else super()._make_steps(request, batch)

    def _result(self, committed: Sealed) -> UpdateResult:
        return self._of(committed)
