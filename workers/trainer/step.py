"""One batch on one rank: what models say of its tokens, advantages, then optimizer steps.

Models are asked before the first optimizer step, over all micro-batches of all steps, and only for what the algorithm
needs: the old log-probs if there is more than one step (in a single one the loss recomputes them by the way), the
reference's, the critic's values. What they say is gathered over ranks into one array over the tokens of the batch, so
sequences and trees may lie across micro-batches and ranks.

Shape suffix: ``M`` trained tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms import kl
from algorithms.sequences import sequence_mean
from algorithms.value_loss import explained_variance
from storage.columns import COLUMN_OF, RETURN
from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch, asks_models
from workers.trainer.credit import assign_credit
from workers.trainer.guard import Guard
from workers.trainer.memory import InWork
from workers.trainer.objective import Objective, StepSums, ValueObjective, correction
from workers.trainer.packing import MicroBatch, WeightedTrajectory
from workers.trainer.rows import Floats
from workers.trainer.usercode import is_target
from workflows.spec import AlgorithmSpec

Planner = Callable[[Sequence[WeightedTrajectory]], tuple[list[MicroBatch], int]]
"""This rank's micro-batches of one optimizer step, and the tokens that all ranks compute for it."""


@dataclass
class Trained:
    """What became of a batch."""

    sums: StepSums
    """Over all optimizer steps."""
    grad_norm: float = 0.0
    """Mean over optimizer steps."""
    optimizer_steps: int = 0
    tokens_on_policy: int = 0
    """See :attr:`MicroBatch.current_N`."""
    tokens_computed: int = 0
    """By all ranks, in all forward passes of the policy."""
    tokens_per_pass: int = 0
    """By all ranks, in one pass over the batch."""
    value_loss: float = 0.0
    """Mean over optimizer steps."""
    explained_variance: float = 0.0
    """Of the returns, by the critic before the batch."""
    return_M: Tensor | None = None
    """What the critic is to learn; None where there is none."""


class _Part(NamedTuple):
    """One optimizer step of an epoch."""

    batches: list[MicroBatch]
    tokens: int
    """Computed by all ranks in one pass."""


class Work:
    """The work on one batch; its methods are collective.

    They raise :class:`~workers.trainer.guard.NotFinite` in front of the first optimizer step whose loss or gradient is
    not finite. ``at`` is kept: it tells which micro-batch is in work, and whether there was a step.
    """

    def __init__(
        self,
        batch: Batch,
        algorithm: AlgorithmSpec,
        backend: TrainingBackend,
        plan: Planner,
        at: InWork | None = None,
    ) -> None:
        self._batch, self._algorithm, self._backend = batch, algorithm, backend
        self._parts = [_Part(*plan(rows)) for rows in batch.minibatches]
        self._guard = Guard(batch, backend)
        self._at = at or InWork()
        self._columns = batch.columns()
        self._old_M = torch.from_numpy(self._columns.engine_logprob_N)
        self._trained = Trained(StepSums(), tokens_per_pass=sum(part.tokens for part in self._parts))

    def run(self) -> Trained:
        """All optimizer steps of the batch."""
        self._prepare()
        norms: list[float] = []
        value_losses: list[float] = []
        for part in self._parts * self._algorithm.epochs:
            if self._batch.step >= self._algorithm.critic_warmup:
                norms.append(self._policy_step(part, first=not norms))
            if self._algorithm.has_critic and "critic" not in self._algorithm.companions_apart:
                value_losses.append(self._critic_step(part))
        self._trained.optimizer_steps = len(norms)
        self._trained.grad_norm = float(np.mean(norms or [0.0]))
        self._trained.value_loss = float(np.mean(value_losses or [0.0]))
        return self._trained

    def run_critic(self) -> Trained:
        """All optimizer steps of the critic alone, on the values and returns that came with the batch."""
        given = self._batch.given
        self._fill({f"{name}_N": torch.from_numpy(given[name]) for name in (COLUMN_OF["critic"], RETURN)})
        value_losses = [self._critic_step(part) for part in self._parts * self._algorithm.epochs]
        self._trained.value_loss = float(np.mean(value_losses))
        return self._trained

    def _sampled_now(self) -> Tensor:
        """Tokens of turns in which no token is of other weights than those before the batch."""
        stale_M = torch.from_numpy(self._columns.version_N) != self._batch.step
        turn_M = self._batch.evidence.turn_N
        return ~torch.isin(turn_M, turn_M[stale_M])

    def accumulate(self, scale: float) -> Trained:
        """The gradient of a batch of one optimizer step, ``scale`` times, without the step."""
        self._prepare()
        for part in self._parts:
            self._accumulate(*self._ready(part, first=True), scale)
        return self._trained

    def _prepare(self) -> None:
        current_M = self._sampled_now()
        self._trained.tokens_on_policy = int(current_M.sum())
        self._fill({"current_N": current_M, **self._ask_models()})

    def _policy_step(self, part: _Part, *, first: bool) -> float:
        batches, objective = self._ready(part, first=first)
        self._accumulate(batches, objective, 1.0)
        norm = self._backend.update(1.0)
        self._guard.check_norm(norm, batches)
        self._at.changed = True
        return norm

    def _critic_step(self, part: _Part) -> float:
        loss = self._backend.update_critic(self._at.over(part.batches), ValueObjective(self._algorithm))
        self._at.changed = True
        self._guard.check_norm(loss, part.batches, of="the critic's loss")
        return loss

    def _accumulate(self, batches: list[MicroBatch], objective: Objective, scale: float) -> None:
        sums = self._backend.accumulate(self._at.over(batches), objective, scale)
        self._guard.check_loss(sums, batches)
        self._trained.sums.add(sums)

    def _ready(self, part: _Part, *, first: bool) -> tuple[list[MicroBatch], Objective]:
        algorithm, batches = self._algorithm, part.batches
        on_policy = first and algorithm.old_logprobs == "recompute"
        if (algorithm.loss_used == "gspo" or is_target(algorithm.loss_used)) and not on_policy:
            log_ratio_M = torch.nan_to_num(self._logprobs([part]) - self._old_M)  # NaN for the sequences of other parts
            mean_M = sequence_mean(log_ratio_M, torch.from_numpy(self._columns.sequence_N)).numpy()
            batches = [replace(b, sequence_log_ratio_N=mean_M[b.token_N]) for b in batches]
        self._trained.tokens_computed += part.tokens
        return batches, Objective(algorithm, self._batch.temperature, self._batch.step, first)

    def _ask_models(self) -> dict[str, Tensor]:
        """The columns that the algorithm needs and packing could not know."""
        algorithm, batches = self._algorithm, [b for part in self._parts for b in part.batches]
        columns: dict[str, Tensor] = {}
        by_sequence = algorithm.correction_level != "token"
        kl_in_reward = algorithm.kl != "none" and algorithm.kl_in == "reward"
        if algorithm.old_logprobs == "recompute" and (algorithm.several_steps or by_sequence or kl_in_reward):
            columns["old_logprob_N"] = self._old_M = self._logprobs(self._parts)
        if by_sequence:
            engine_M, sequence_M = map(torch.from_numpy, (self._columns.engine_logprob_N, self._columns.sequence_N))
            columns["importance_N"] = correction(algorithm, self._old_M, engine_M, sequence_M)
        if algorithm.kl != "none":
            columns["reference_logprob_N"] = self._said("reference_logprob", batches, self._reference_logprobs)
        if algorithm.has_critic:
            columns["value_N"] = self._said("value", batches, self._backend.values)
        for name, column_M in columns.items():
            self._guard.check_column(name, column_M, batches)
        if asks_models(algorithm):
            kl_M = kl.ESTIMATORS[algorithm.kl](self._old_M, columns["reference_logprob_N"]) if kl_in_reward else None
            columns |= self._credit(kl_M, columns.get("value_N"))
        return columns

    def _credit(self, kl_M: Tensor | None, value_M: Tensor | None) -> dict[str, Tensor]:
        weight_M = torch.from_numpy(self._columns.weight_N)
        credit = assign_credit(self._batch.evidence, self._algorithm, weight_M, kl_N=kl_M, value_N=value_M)
        if value_M is not None:
            self._trained.explained_variance = explained_variance(value_M, credit.return_N)
            self._trained.return_M = credit.return_N
        return {"advantage_N": credit.advantage_N, "return_N": credit.return_N}

    def _fill(self, columns: dict[str, Tensor]) -> None:
        """Padding gets some token's values: it has no weight."""
        arrays: dict[str, Any] = {name: column_M.numpy() for name, column_M in columns.items()}
        for part in self._parts:
            part.batches[:] = [
                replace(b, **{name: array_M[b.token_N] for name, array_M in arrays.items()}) for b in part.batches
            ]

    def _logprobs(self, parts: Sequence[_Part]) -> Tensor:
        """By the policy as it is now; NaN for tokens of other parts."""
        self._trained.tokens_computed += sum(part.tokens for part in parts)
        batches = [b for part in parts for b in part.batches]
        return self._gathered(batches, self._backend.logprobs(self._at.over(batches), self._batch.temperature))

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Floats]:
        return self._backend.reference_logprobs(batches, self._batch.temperature)

    def _said(self, column: str, batches: Sequence[MicroBatch], ask: Callable[[Sequence[MicroBatch]], Any]) -> Tensor:
        """What came with the batch, from a gang that holds the model; else what this gang's own says."""
        if (given_M := self._batch.given.get(column)) is not None:
            return torch.from_numpy(given_M)
        return self._gathered(batches, ask(self._at.over(batches)))

    def _gathered(self, batches: Sequence[MicroBatch], values: Sequence[Floats]) -> Tensor:
        """What all ranks found, by token of the batch."""
        tokens, found = np.concatenate([b.token_N for b in batches]), np.concatenate(values)
        flat_M = np.full(len(self._columns.token_N), np.nan, np.float32)
        for token_N, value_N in self._backend.gather((tokens, found)):
            known_N = token_N >= 0
            flat_M[token_N[known_N]] = value_N[known_N]
        return torch.from_numpy(flat_M)
