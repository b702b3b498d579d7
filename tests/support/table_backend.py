"""A training back end whose models are tables of next-token logits by token: an oracle for it needs no attention."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.trainer.backend import StepOutcome
from workers.trainer.batch import Batch
from workers.trainer.objective import Objective, StepSums, ValueObjective, token_logprobs
from workers.trainer.packing import MicroBatch, plan
from workers.trainer.step import Planner, Trained, train_batch
from workflows.algorithm import AlgorithmSpec

VOCABULARY = 64


def table(seed: int, columns: int = VOCABULARY) -> Tensor:
    return torch.randn(VOCABULARY, columns, generator=torch.Generator().manual_seed(seed))


class TableBackend:
    """Policy, reference and critic as tables, trained by plain gradient descent."""

    rank, world_size, compute_dtype, packs = 0, 1, "float32", True

    def __init__(self, rate: float = 30.0) -> None:
        self.rate = rate
        self.policy = table(0).requires_grad_()
        self.reference = table(1)
        self.critic = table(2, 1).requires_grad_()

    def update(self, batches: Sequence[MicroBatch], objective: Objective) -> StepOutcome:
        sums, total = StepSums(), torch.zeros(())
        for batch in batches:
            loss, part = objective(self.policy[predictors(batch)], batch)
            total = total + loss
            sums.add(part)
        self._descend(self.policy, total, self.rate)
        everything = StepSums()
        for part in self.gather(sums):
            everything.add(part)
        return StepOutcome(everything, 1.0)

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.policy, batch, temperature) for batch in batches]

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.reference, batch, temperature) for batch in batches]

    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        return [self.critic.detach()[predictors(batch), 0].numpy() for batch in batches]

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        losses = [objective(self.critic[predictors(batch), 0], batch) for batch in batches]
        total = torch.stack(losses).sum()
        self._descend(self.critic, total, 1.0)
        return sum(self.gather(float(total.detach())))

    def _descend(self, weights: Tensor, loss: Tensor, rate: float) -> None:
        """By the sum of all ranks' gradients."""
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            weights -= rate * torch.stack(self.gather(gradient)).sum(0)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def initialize(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def publish(self, folder: Path) -> None: ...
    def park(self) -> None: ...
    def unpark(self) -> None: ...
    def close(self) -> None: ...
    def broadcast(self, value: Any) -> Any:
        return value


class TableGang:
    """Ranks as threads: what one gathers, all have said."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._said: list[Any] = [None] * ranks
        self.backends = [_Rank(self, rank) for rank in range(ranks)]

    def train(self, batch: Batch, algorithm: AlgorithmSpec, row_tokens: int) -> list[Trained]:
        """What each rank gives."""

        def work(backend: TableBackend) -> Trained:
            return train_batch(batch, algorithm, backend, planner(row_tokens, backend.rank, len(self.backends)))

        with ThreadPoolExecutor(len(self.backends)) as threads:
            return list(threads.map(work, self.backends))

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class _Rank(TableBackend):
    def __init__(self, gang: TableGang, rank: int) -> None:
        super().__init__()
        self.rank, self._gang = rank, gang

    def gather(self, value: Any) -> list[Any]:
        return self._gang.exchange(self.rank, value)


def predictors(batch: MicroBatch) -> Tensor:
    return torch.from_numpy(batch.ids_T[batch.predictor_K[batch.predictor_N]])


@torch.no_grad()
def _logprobs(logits: Tensor, batch: MicroBatch, temperature: float) -> npt.NDArray[np.float32]:
    return token_logprobs(logits[predictors(batch)], torch.from_numpy(batch.target_N), temperature)[0].numpy()


def descend(weights: Tensor, loss: Tensor, rate: float) -> None:
    (gradient,) = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        weights -= rate * gradient


def planner(row_tokens: int, rank: int = 0, ranks: int = 1) -> Planner:
    return lambda rows: plan(rows, rank=rank, ranks=ranks, row_tokens=row_tokens)
