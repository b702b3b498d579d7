"""One rank's work, without network and threads: start from a checkpoint, run updates, commit them.

An update is *read batch, train, save, seal the checkpoint, publish the weights*. It is committed when its checkpoint
has its final name; weights are always published from a committed checkpoint, so a rank that is killed in between
publishes the same bytes after its restart. A committed update is never trained again: asked once more, the trainer
returns what was committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from storage.columns import COLUMN_OF, RETURN, Column, key_for, write_column
from storage.errors import BadBatch, ConfigError, FencedError, IntegrityError, SeamlessFlowError, TrainerError
from storage.objects import ObjectStore
from storage.weights import WeightsRef, WeightsStore
from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.checkpoint import CheckpointFolder, Sealed, TrainerState, open_checkpoint, verify
from workers.trainer.figures import metrics_of
from workers.trainer.guard import NotFinite, advice
from workers.trainer.head_start import HeadStart
from workers.trainer.launch import Launch
from workers.trainer.messages import ColumnRef, UpdateRequest, UpdateResult
from workers.trainer.objective import StepSums
from workers.trainer.packing import MicroBatch, WeightedTrajectory, plan
from workers.trainer.rank import BatchReader, Rank
from workers.trainer.step import Trained, Work

_log = logging.getLogger(__name__)


class Trainer(Rank):
    """A rank that trains the policy."""

    def __init__(
        self,
        launch: Launch,
        backend: TrainingBackend,
        read: BatchReader,
        checkpoints: CheckpointFolder,
        weights: WeightsStore,
        store: ObjectStore,
    ) -> None:
        super().__init__(launch, backend, read, store)
        self._checkpoints = checkpoints
        self._weights = weights
        self._held: Sealed | None = None
        self._results: dict[tuple[int, int], tuple[str, UpdateResult]] = {}
        self._head_start = HeadStart(launch.spec.algorithm, backend, self._plan, self._at)

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train one step, or return its committed result.

        Raises :class:`FencedError` if the trainer holds another version than the step starts from,
        :class:`StorageError` or :class:`IntegrityError` if the batch cannot be read, :class:`BadBatch` if it cannot be
        trained (nothing has changed then), and :class:`GangLost`, or :class:`OutOfMemory` or :class:`ConfigError` where
        that would be in vain, if anything fails later: the gang must restart from its checkpoint.
        """
        known = self._results.get((request.lineage, request.step))
        if known is not None:
            manifest_digest, result = known
            _same_manifest(request, manifest_digest)
            return result
        self._must_have_device()
        self._must_be_told(request)
        started = time.monotonic()
        committed = self._together.on_rank_0("look for a committed result", lambda: self._committed(request))
        if committed is None:
            batch = self._prepare(request)
            committed = self._irrevocably("train and save", lambda: self._train(request, batch, started))
        elif self.progress.version == request.step:
            self._irrevocably("load the committed result", lambda: self._restore(committed, None))
        result = self._irrevocably("publish weights", lambda: self._result(committed))
        self._results[request.lineage, request.step] = (request.manifest_digest, result)
        self.progress.phase = "ready"
        return result

    def accumulate(self, request: UpdateRequest) -> int:
        """Compute the gradients of groups that the next step will probably train; returns how many groups are held.

        Groups that are held already are left out, so a repeated call changes nothing. Raises what :meth:`update` does.
        """
        if request.step != self.progress.version:
            raise FencedError(f"step {request.step} is not next: the trainer holds version {self.progress.version}")
        self._must_have_device()
        self._must_be_told(request)
        held = frozenset(self._head_start.shards)
        batch = self._together.everywhere("read a part of the batch", lambda: self._read(request, held))
        self.progress.phase = "training"
        self._irrevocably("accumulate", lambda: self._accumulate(batch))
        self.progress.phase = "ready"
        return len(self._head_start.shards)

    def _resume(self) -> None:
        if self._launch.checkpoint is not None:
            self._restore(open_checkpoint(self._launch.checkpoint), self._launch.checkpoint_digest)

    def _must_be_told(self, request: UpdateRequest) -> None:
        """Models that are not this gang's have their say before an update."""
        if missing := sorted(self._needed() - {column.name for column in request.columns}):
            raise TrainerError(
                f"step {request.step} came without the column {missing[0]}, whose model this gang does not hold: have "
                "the batch computed on that model's nodes first"
            )

    def _needed(self) -> set[str]:
        return {COLUMN_OF[name] for name in self._spec.algorithm.companions_apart}

    def _committed(self, request: UpdateRequest) -> Sealed | None:
        """The step's checkpoint, if an earlier attempt sealed it. Checks that the request can be served at all."""
        found = self._checkpoints.find(request.lineage, request.step)
        if found is not None and self.progress.version in (request.step, request.step + 1):
            _same_manifest(request, found.state.manifest_digest)
            if self.progress.version == request.step and found.state.parent != self._parent():
                raise IntegrityError(
                    f"checkpoint {found.path} continues another state than the one held (version {request.step}): "
                    "replay the step under a new lineage"
                )
            return found
        if request.step != self.progress.version:
            raise FencedError(
                f"step {request.step} starts from weight version {request.step}, but the trainer holds version "
                f"{self.progress.version}: restart the gang from the checkpoint of version {request.step}"
            )
        return None

    def _prepare(self, request: UpdateRequest) -> Batch:
        self.progress.phase, self.progress.step = "loading", request.step
        try:
            dropped = frozenset(request.dropped)
            return self._together.everywhere("read the batch", lambda: self._read(request, dropped=dropped))
        except SeamlessFlowError:
            self.progress.phase = "ready"
            raise

    def _train(self, request: UpdateRequest, batch: Batch, started: float) -> Sealed:
        training, rate = time.monotonic(), self._backend.learning_rate
        batch, done, dropped = self._optimize(request, batch)
        trained = time.monotonic()
        self.progress.phase = "saving"
        temporary = self._together.on_rank_0("make room for a checkpoint", lambda: self._begin(request))
        self._together.everywhere("save", lambda: self._backend.save(temporary))
        metrics = metrics_of(
            batch,
            done,
            dropped=len(dropped),
            learning_rate=rate,
            seconds=time.monotonic() - started,
            seconds_training=trained - training,
        )
        state = TrainerState(
            run=self._spec.run,
            lineage=request.lineage,
            step=request.step,
            version=request.step + 1,
            seed=self._spec.seed,
            world_size=self._launch.world_size,
            compute_dtype=self._backend.compute_dtype,
            manifest_digest=request.manifest_digest,
            parent=self._parent(),
            metrics=metrics,
            dropped=tuple(sorted(dropped)),
            returns=self._returns(request, batch, done),
        )
        sealed = self._together.on_rank_0("seal the checkpoint", lambda: self._checkpoints.seal(temporary, state))
        self._hold(sealed)
        return sealed

    def _returns(self, request: UpdateRequest, batch: Batch, done: Trained) -> ColumnRef | None:
        """Written for a critic apart, which learns from them; None where there is none."""
        if self._launch.role != "trainer" or "critic" not in self._spec.algorithm.companions_apart:
            return None
        return_M = np.empty(0, np.float32) if done.return_M is None else done.return_M.numpy()
        column = Column(RETURN, batch.places(), return_M)
        key = key_for(self._spec.run, RETURN, request.manifest_digest, f"l{request.lineage}")
        digest = self._together.on_rank_0("write the returns", lambda: write_column(self._store, key, column))
        return ColumnRef(name=RETURN, key=key, digest=digest)

    def _accumulate(self, batch: Batch) -> None:
        try:
            self._head_start.add(batch)
        except NotFinite as found:  # it is judged when its step comes, which computes all of it
            _log.warning("the head start of step %d is dropped: %s", batch.step, found)
            self._head_start.drop()

    def _optimize(self, request: UpdateRequest, batch: Batch) -> tuple[Batch, Trained, frozenset[str]]:
        """What was trained, what became of it, and the sessions that were left out because they cannot be."""
        dropped: frozenset[str] = frozenset()
        while True:
            self.progress.phase, self._at.changed = "training", False
            try:
                return batch, self._make_steps(request, batch), dropped
            except NotFinite as found:
                self._head_start.drop()
                self._judge(request, found)
                _log.warning("step %d goes on without %s: %s", request.step, ", ".join(sorted(found.sessions)), found)
                dropped |= found.sessions
            batch = self._together.everywhere("read the batch", partial(self._read, request, dropped=dropped))

    def _make_steps(self, request: UpdateRequest, batch: Batch) -> Trained:
        """Without any if no token of the batch can be trained: the version advances, the weights stay."""
        done = self._head_start.finish(batch, lambda held: self._read(request, held))
        if done is not None:
            return done
        if not batch.minibatches:
            return Trained(StepSums())
        return Work(batch, self._spec.algorithm, self._backend, self._plan, self._at).run()

    def _judge(self, request: UpdateRequest, found: NotFinite) -> None:
        """Go back to the state before the step. Raises :class:`BadBatch` unless the step can go on without sessions."""
        held, policy = self._held, self._spec.trainer.on_bad_batch
        stuck = self._at.changed and held is None  # before the first checkpoint only a restart goes back
        if self._at.changed and held is not None:
            self._together.everywhere("load the checkpoint", lambda: self._backend.load(held.path))
        if policy == "skip" and found.alone and not stuck:
            return
        self.progress.phase = "failed" if stuck else "ready"
        raise BadBatch(
            f"step {request.step} cannot be trained: {found}. Nothing was changed by it; its batch is the manifest "
            f"{request.manifest_key}. {advice(found, policy)}; then start the run again, which goes on here"
        ) from found

    def _plan(self, rows: Sequence[WeightedTrajectory]) -> tuple[list[MicroBatch], int]:
        return plan(
            rows,
            rank=self._launch.rank,
            ranks=self._launch.world_size,
            row_tokens=self._spec.trainer.row_tokens if self._backend.packs else 1,  # 1: each path by itself
            merge=self._spec.trainer.rows == "tree" and self._backend.packs,
        )

    def _begin(self, request: UpdateRequest) -> Path:
        if self._held is not None:
            self._checkpoints.collect(self._held, self._spec.trainer.keep_checkpoints)
        return self._checkpoints.begin(request.lineage, request.step)

    def _result(self, committed: Sealed) -> UpdateResult:
        weights = self._publish(committed.state.version)
        return self._of(committed).model_copy(
            update={"weights_path": str(weights.path), "weights_digest": weights.digest}
        )

    def _of(self, committed: Sealed) -> UpdateResult:
        """The result, without published weights."""
        state = committed.state
        return UpdateResult(
            lineage=state.lineage,
            step=state.step,
            version=state.version,
            checkpoint_path=str(committed.path),
            checkpoint_digest=committed.digest,
            metrics=state.metrics,
            dropped=state.dropped,
            returns=state.returns,
        )

    def _publish(self, version: int) -> WeightsRef:
        """Written anew even if an earlier attempt has: what is published under a version may be of an older lineage,
        and equal weights stay as they are.
        """
        temporary = self._together.on_rank_0("make room for weights", lambda: self._weights.begin(version))
        self._together.everywhere("publish weights", lambda: self._backend.publish(temporary))
        return self._together.on_rank_0("publish weights", lambda: self._weights.commit(version, temporary))

    def _restore(self, checkpoint: Sealed, digest: str | None) -> None:
        self._together.on_rank_0("verify the checkpoint", lambda: self._check(checkpoint, digest))
        self._head_start.drop()
        self._together.everywhere("load the checkpoint", lambda: self._backend.load(checkpoint.path))
        self._hold(checkpoint)

    def _check(self, checkpoint: Sealed, digest: str | None) -> None:
        if digest is not None and digest != checkpoint.digest:
            raise IntegrityError(f"checkpoint {checkpoint.path} has digest {checkpoint.digest}, expected {digest}")
        state = checkpoint.state
        found = {"run": state.run, "compute_dtype": state.compute_dtype}
        wanted = {"run": self._spec.run, "compute_dtype": self._backend.compute_dtype}
        for name, value in found.items():
            if value != wanted[name]:
                raise ConfigError(
                    f"checkpoint {checkpoint.path} has {name} {value}, this gang has {wanted[name]}: one that goes on "
                    "may have another number of ranks or ZeRO stage, nothing else"
                )
        verify(checkpoint)

    def _hold(self, checkpoint: Sealed) -> None:
        self._held = checkpoint
        self.progress.version = checkpoint.state.version
        self.progress.lineage = checkpoint.state.lineage
        self.progress.step = checkpoint.state.version

    def _parent(self) -> str:
        return "" if self._held is None else self._held.digest


def _same_manifest(request: UpdateRequest, digest: str) -> None:
    if digest != request.manifest_digest:
        raise IntegrityError(
            f"step {request.step} of lineage {request.lineage} was trained on manifest {digest[:12]}, "
            f"but {request.manifest_digest[:12]} is asked for: use a new lineage"
        )
