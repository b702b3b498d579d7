"""From a run's books to its reward curve, and from curves to the figures that are compared. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

from storage.errors import ConfigError
from storage.ledger import SampleRow, StepRecord

SIGMAS = 2.0
"""Two ends are within noise of each other if they differ by at most so many standard errors of their difference."""


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Row:
    """One run, as kept in the results file."""

    task: str
    setting: str
    seed: int
    digest: str
    """Of what was run, see :meth:`benchmarks.learning.plan.Cell.digest`."""
    rewards: tuple[tuple[float, ...], ...]
    """By step: the mean reward of each group of its batch, those with equal rewards included."""
    staleness: tuple[float, ...]
    """By step: mean age of the trained tokens, in updates."""
    wall_s: float
    """Of the call that ended it."""

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Row:
        rewards = tuple(tuple(step) for step in data["rewards"])
        return cls(**{**data, "rewards": rewards, "staleness": tuple(data["staleness"])})

    @property
    def curve(self) -> list[float]:
        """Mean reward by step."""
        return [fmean(step) for step in self.rewards]

    @property
    def staleness_mean(self) -> float:
        return fmean(self.staleness)

    def first(self, steps: int) -> Mean:
        """Reward over the first steps."""
        return mean_of([group for step in self.rewards[:steps] for group in step])

    def end(self, steps: int) -> Mean:
        """Reward over the last steps."""
        return mean_of([group for step in self.rewards[-steps:] for group in step])


def mean_of(values: Sequence[float]) -> Mean:
    """Mean of independent values, here of groups: samples of one task are not independent, tasks are.

    >>> str(mean_of([0.0, 1.0, 1.0, 0.0]))
    '0.500 ± 0.289'
    """
    if len(values) < 2:
        raise ConfigError(f"{len(values)} groups have no standard error: take more steps or groups")
    return Mean(fmean(values), math.sqrt(variance(values) / len(values)))


def over_seeds(ends: Sequence[Mean]) -> Mean:
    """A setting's end: the mean over its seeds.

    Its error is the larger of two: the spread of the seeds, and what their groups alone would give. A spread below that
    is chance, since each seed's end is itself only measured.
    """
    groups = math.sqrt(sum(end.error**2 for end in ends)) / len(ends)
    values = [end.value for end in ends]
    seeds = math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
    return Mean(fmean(values), max(seeds, groups))


@dataclass(frozen=True)
class Comparison:
    """Two settings' ends."""

    difference: float
    noise: float
    """``SIGMAS`` standard errors of the difference."""

    @property
    def within_noise(self) -> bool:
        return abs(self.difference) <= self.noise


def compare(one: Mean, other: Mean) -> Comparison:
    """The other's end less the one's."""
    return Comparison(other.value - one.value, SIGMAS * math.hypot(one.error, other.error))


def group_rewards(samples: Iterable[SampleRow], steps: int) -> tuple[tuple[float, ...], ...]:
    """By step: the mean reward of each group of its batch. Raises :class:`ConfigError` if a step has none."""
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in samples:
        if row.step is not None and row.reward is not None:
            found[row.step][row.key.ordinal].append(row.reward)
    missing = [step for step in range(steps) if step not in found]
    if missing:
        raise ConfigError(f"step {missing[0]} has no group with a reward")
    return tuple(tuple(fmean(found[step][ordinal]) for ordinal in sorted(found[step])) for step in range(steps))


def staleness(steps: Iterable[StepRecord]) -> tuple[float, ...]:
    """By step, of the newest lineage: a step that was made again after a rewind counts as it was made last."""
    newest = {step.step: step for step in sorted(steps, key=lambda step: step.lineage)}
    return tuple(round(float(newest[number].metrics["staleness_mean"]), 4) for number in sorted(newest))
