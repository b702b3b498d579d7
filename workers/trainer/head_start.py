"""Gradients accumulated ahead of a step's batch, as groups complete (pipeline ``micro_batch``).

A head start is only that: the batch is the manifest the step has claimed. If it holds every group that was accumulated,
their gradients are used and only the others are computed; if not, or if the ranks do not agree on what they hold, all
of it is computed as if there had been none.

The loss of a batch is a mean over its tokens or sessions, whose number is known when the batch is. So each part is
accumulated times its own number, and the sum is divided by the total before gradients are clipped: the same gradient,
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.trainer.backend import TrainingBackend
from workers.trainer.batch import Batch
from workers.trainer.guard import Guard
from workers.trainer.memory import InWork
from workers.trainer.objective import StepSums
from workers.trainer.step import Planner, Trained, Work
from workflows.spec import AlgorithmSpec


@dataclass
class HeadStart:
    """What one rank has accumulated since its last optimizer step."""

    algorithm: AlgorithmSpec
    backend: TrainingBackend
    plan: Planner
    at: InWork
    shards: set[str] = field(default_factory=set)
    mass: float = 0.0
    """Tokens or sessions accumulated: whatever the loss is a mean over."""
    trained: Trained = field(default_factory=lambda: Trained(StepSums()))

    def add(self, batch: Batch) -> None:
        """Accumulate groups; those that are held already must not be among them. Collective.

        Raises :class:`~workers.trainer.guard.NotFinite`: then :meth:`drop` it all.
        """
        self.shards |= batch.shards
        if not batch.minibatches:
            return
        mass = mean_over(batch, self.algorithm)
        found = Work(batch, self.algorithm, self.backend, self.plan, self.at).accumulate(mass)
        found.sums.loss *= mass
        self.mass += mass
        self.trained.sums.add(found.sums)
        self.trained.tokens_computed += found.tokens_computed
        self.trained.tokens_per_pass += found.tokens_per_pass
        self.trained.tokens_on_policy += found.tokens_on_policy

    def finish(self, batch: Batch, read_rest: Callable[[frozenset[str]], Batch]) -> Trained | None:
        """The optimizer step of ``batch``, of which ``read_rest`` gives what is not held; None: it is no help.

        Collective. Raises :class:`~workers.trainer.guard.NotFinite` as :class:`~workers.trainer.step.Work` does.
        """
        mine = tuple(sorted(self.shards))
        agreed = all(other == mine for other in self.backend.gather(mine))
        if not (mine and agreed and self.shards <= batch.shards):
            self.drop()
            return None
        if self.shards < batch.shards:
            self.add(read_rest(frozenset(self.shards)))
        done, mass = self.trained, self.mass
        if mass:
            done.grad_norm, done.optimizer_steps = self.backend.update(1.0 / mass), 1
            Guard(batch, self.backend).check_norm(done.grad_norm, [])
            done.sums.loss /= mass
        self._reset()
        return done

    def drop(self) -> None:
        """Forget all of it."""
        if self.mass:
            self.backend.forget()
        self._reset()

    def _reset(self) -> None:
        self.shards, self.mass, self.trained = set(), 0.0, Trained(StepSums())


def mean_over(batch: Batch, algorithm: AlgorithmSpec) -> float:
    """What the loss of a batch is a mean over: its trained tokens, or its sessions that have any."""
    if algorithm.aggregation_used == "token_mean":
        return float(batch.trained)
    return float(len(set(batch.evidence.session_N.tolist())))
