"""What the ranks of every role share: their place in a gang, the device they give away and take, what their model says
of a batch, how they fail. The ranks of a reference, which is never trained, do no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from storage.columns import COLUMN_OF, Column, find_column, key_for, write_column
from storage.errors import BadBatch, ConfigError, GangLost, OutOfMemory, TrainerError
from storage.objects import ObjectStore
from workers.trainer import memory
from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.launch import Launch
from workers.trainer.memory import InWork
from workers.trainer.messages import ColumnRef, ColumnRequest, UpdateRequest, UpdateResult
from workers.trainer.progress import Progress
from workers.trainer.shares import column_of, share_of
from workers.trainer.together import Together
from workers.trainer.usercode import load_user_code

T = TypeVar("T")


class BatchReader(Protocol):
    """Gives the batch of a request; see :func:`workers.trainer.batch.read_batch`."""

    def __call__(
        self,
        request: UpdateRequest,
        without: frozenset[str] = frozenset(),
        dropped: frozenset[str] = frozenset(),
    ) -> Batch: ...


class Rank:
    """One rank. Methods are called from one thread, on all ranks of the gang in the same order."""

    def __init__(self, launch: Launch, backend: TrainingBackend, read: BatchReader, store: ObjectStore) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._backend = backend
        self._together = Together(backend)
        self._read = read
        self._store = store
        self._at = InWork()
        self.progress = Progress()

    def start(self) -> None:
        """Meet the gang and load the models it holds, in the state that the launch file asks for."""
        load_user_code(self._spec)
        self._backend.initialize()
        self._resume()
        self.progress.phase = "ready"

    def _resume(self) -> None:
        """Go on from a checkpoint; what never changes has none."""

    def update(self, request: UpdateRequest) -> UpdateResult:
        """Train one step."""
        raise self._cannot("trains nothing")

    def accumulate(self, request: UpdateRequest) -> int:
        """Compute gradients ahead of a step."""
        raise self._cannot("trains nothing")

    def columns(self, request: ColumnRequest) -> ColumnRef:
        """Have the gang's model say what it can of a share of a batch's tokens; what is written is not computed again.

        Raises :class:`StorageError` or :class:`IntegrityError` if the batch cannot be read, :class:`GangLost` or
        :class:`OutOfMemory` if it cannot be computed.
        """
        if self._launch.role not in COLUMN_OF:
            raise self._cannot("says nothing of a batch but by training on it")
        self._must_have_device()
        self.progress.step = request.step
        name, by = COLUMN_OF[self._launch.role], self._stands_at()
        key = key_for(self._spec.run, name, request.manifest_digest, by, request.share, request.shares)
        digest = self._together.on_rank_0("look for a written column", lambda: find_column(self._store, key))
        if digest is None:
            batch = self._together.everywhere("read the batch", lambda: self._read(request))
            self.progress.phase = "computing"
            column = self._irrevocably("compute a column", lambda: self._column(name, batch, request))
            self.progress.phase = "ready"
            digest = self._together.on_rank_0("write a column", lambda: write_column(self._store, key, column))
        return ColumnRef(name=name, key=key, digest=digest)

    def _column(self, name: str, batch: Batch, request: ColumnRequest) -> Column:
        mine = share_of(batch, self._spec, self._backend, request)
        noted = self._at.over(mine)
        if self._launch.role == "critic":
            said = self._backend.values(noted)
        else:
            said = self._backend.reference_logprobs(noted, batch.temperature)
        return column_of(name, batch, mine, said, self._backend)

    def _stands_at(self) -> str:
        """The model's state, in a word: a column is of one."""
        return "initial"

    def park(self) -> None:
        """Leave the device to another role until :meth:`unpark`; repeated, or while parked, nothing happens."""
        if self.progress.phase == "ready":
            self._irrevocably("park", self._backend.park)
            self.progress.phase = "parked"

    def unpark(self) -> None:
        """Take the device again."""
        if self.progress.phase == "parked":
            self._irrevocably("unpark", self._backend.unpark)
            self.progress.phase = "ready"

    def _cannot(self, what: str) -> TrainerError:
        return TrainerError(f"this rank is of a gang with the role {self._launch.role!r}, which {what}")

    def _must_have_device(self) -> None:
        if self.progress.phase == "parked":
            raise TrainerError("the trainer is parked, its device may be another's: its lease unparks it first")

    def _irrevocably(self, what: str, work: Callable[[], T]) -> T:
        """Work after which the ranks' states may differ if it fails."""
        try:
            return work()
        except BadBatch:
            raise
        except Exception as error:
            self.progress.phase = "failed"
            # What a restart would not cure is told with the connections open: ranks that wait for this one would be
            # quicker to say that they have lost it.
            if isinstance(error, ConfigError):
                raise
            if memory.out_of_memory(error):
                advised = memory.advice(self._at, self._spec.trainer, packs=self._backend.packs)
                raise OutOfMemory(
                    f"step {self.progress.step}: rank {self._launch.rank} ran out of memory ({what}, {self._at}): "
                    f"{type(error).__name__} {str(error)[:200]}. To go on, {advised}; then start the run again, which "
                    "goes on here"
                ) from error
            self._backend.close()  # closes the connections: ranks that wait for this one see that it is gone
            if isinstance(error, GangLost):
                raise
            raise GangLost(
                f"{what} failed on rank {self._launch.rank} ({type(error).__name__}: {error}): "
                "restart the gang from its last checkpoint"
            ) from error
