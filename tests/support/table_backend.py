"""A training back end whose models are tables of next-token logits by token: an oracle for it needs no attention."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.trainer.batch import Batch
from workers.trainer.objective import Objective, StepSums, ValueObjective, token_logprobs
from workers.trainer.packing import MicroBatch, plan
from workers.trainer.step import Planner, Trained, Work
from workflows.algorithm import AlgorithmSpec

VOCABULARY = 64


def table(seed: int, columns: int = VOCABULARY) -> Tensor:
    return torch.randn(VOCABULARY, columns, generator=torch.Generator().manual_seed(seed))


class TableBackend:
    """Policy, reference and critic as tables, trained by plain gradient descent."""

    rank, world_size, compute_dtype, packs, learning_rate = 0, 1, "float32", True, 0.01

    def __init__(self, rate: float = 30.0) -> None:
        self.rate = rate
        self.policy = table(0).requires_grad_()
        self.reference = table(1)
        self.critic = table(2, 1).requires_grad_()
        self.gradient = torch.zeros_like(self.policy)

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective, scale: float) -> StepSums:
        sums = StepSums()
        for batch in batches:
            loss, part = objective(self.policy[predictors(batch)], batch)
            sums.add(part)
            (gradient,) = torch.autograd.grad(scale * loss, self.policy)
            self.gradient = self.gradient + gradient
        everything = StepSums()
        for part in self.gather(sums):
            everything.add(part)
        return everything

    def update(self, scale: float) -> float:
        gradient = scale * torch.stack(self.gather(self.gradient)).sum(0)
        self.forget()
        norm = float(gradient.norm())
        if math.isfinite(norm):
            with torch.no_grad():
                self.policy -= self.rate * gradient
        return norm

    def forget(self) -> None:
        self.gradient = torch.zeros_like(self.policy)

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.policy, batch, temperature) for batch in batches]

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [_logprobs(self.reference, batch, temperature) for batch in batches]

    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        return [self.critic.detach()[predictors(batch), 0].numpy() for batch in batches]

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        losses = [objective(self.critic[predictors(batch), 0], batch) for batch in batches]
        total = torch.stack(losses).sum()
        (gradient,) = torch.autograd.grad(total, self.critic)
        with torch.no_grad():
            self.critic -= torch.stack(self.gather(gradient)).sum(0)
        return sum(self.gather(float(total.detach())))

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def initialize(self) -> None: ...
    def save(self, folder: Path) -> None:
        torch.save((self.policy.detach(), self.critic.detach()), folder / "tables.pt")

    def load(self, folder: Path) -> None:
        policy, critic = torch.load(folder / "tables.pt")
        self.policy, self.critic = policy.requires_grad_(), critic.requires_grad_()

    def publish(self, folder: Path) -> None:
        (folder / "policy.safetensors").write_bytes(self.policy.detach().numpy().tobytes())

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
            return Work(batch, algorithm, backend, planner(row_tokens, backend.rank, len(self.backends))).run()

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
