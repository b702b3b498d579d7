"""What a training back end must do. One implementation ships: DeepSpeed.

All methods but ``park`` and ``unpark`` are collective: every rank of the gang calls them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workers.trainer.objective import Objective, StepSums, ValueObjective
from workers.trainer.packing import MicroBatch

T = TypeVar("T")


class TrainingBackend(Protocol):
    """A process group that holds one model and its optimizer state."""

    rank: int
    world_size: int
    compute_dtype: str
    """``float32`` or ``bfloat16``: what the model computes in; checkpoints depend on it. Known after initialize."""
    packs: bool
    """Whether the model computes trees, see :func:`workers.trainer.forward.use_trees`. Known after initialize."""

    @property
    def learning_rate(self) -> float:
        """Of the policy's next optimizer step, or the critic's where the gang has no policy."""
        ...

    def initialize(self) -> None:
        """Meet the other ranks and load the initial model."""

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective, scale: float) -> StepSums:
        """Add ``scale`` times the gradient of their loss to what :meth:`update` will use; their sums over all ranks.

        ``batches`` is gone through once, in order: who gave it knows from that which one is in work.
        """
        ...

    def update(self, scale: float) -> float:
        """One optimizer step on ``scale`` times what was accumulated; the gradient's global norm before clipping.

        If that is not finite there is no step: the gradient is dropped and nothing else has changed.
        """
        ...

    def forget(self) -> None:
        """Drop what was accumulated."""

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probs of the trained tokens under the weights held now; nothing changes."""

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        """The same by the run's reference model, which never changes."""

    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        """The critic's value of the state in front of each trained token."""

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        """One step of the critic's own optimizer; the loss over all ranks."""

    def save(self, folder: Path) -> None:
        """Write model and optimizer state, also the critic's, into ``folder``, in a form that any gang can load."""

    def load(self, folder: Path) -> None:
        """Take over what :meth:`save` wrote, whatever the number of ranks and the ZeRO stage were.

        Raises :class:`ConfigError` if it is another model's.
        """

    def publish(self, folder: Path) -> None:
        """Rank 0 writes the model into ``folder`` as Hugging Face files in the run's dtype."""

    def park(self) -> None:
        """The device goes to another role: leave it, keep all state. Each rank for itself, never twice in a row."""

    def unpark(self) -> None:
        """The device is back: be as before :meth:`park`, which came before."""

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in rank order, on every rank."""
        ...

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        ...

    def close(self) -> None:
        """Leave the process group."""
