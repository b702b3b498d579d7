"""Where the time of nodes went, and what became of samples and tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from workflows.scheduling.pipeline import PipelinePolicy

Activity = Literal["decode", "rollout_idle", "sync", "train", "train_idle", "switch", "down"]
"""What a node does. Busy are ``decode`` (at least one request) and ``train``; ``sync`` (weights are loaded), ``switch``
(from one role to the other) and the idle ones are idle; ``down`` is not held."""

BUSY: tuple[Activity, ...] = ("decode", "train")
ROLLOUT: tuple[Activity, ...] = ("decode", "rollout_idle", "sync")
TRAIN: tuple[Activity, ...] = ("train", "train_idle")


class Segment(NamedTuple):
    """A node did one thing for a while."""

    node: str
    activity: Activity
    start: float
    end: float


class NodeClock:
    """Books the time of one node, each second under exactly one activity."""

    def __init__(self, node: str, segments: list[Segment] | None) -> None:
        self.node = node
        self.seconds: dict[Activity, float] = defaultdict(float)
        self._segments = segments
        self._activity: Activity = "rollout_idle"
        self._since = 0.0

    def change(self, now: float, activity: Activity) -> None:
        """From now on the node does ``activity``."""
        if activity == self._activity:
            return
        self._book(now)
        self._activity = activity

    def restart(self, now: float) -> None:
        """Forget what was booked: the time that is measured begins now."""
        self.seconds.clear()
        self._since = now

    def close(self, now: float) -> None:
        self._book(now)

    def _book(self, now: float) -> None:
        if now > self._since:
            self.seconds[self._activity] += now - self._since
            if self._segments is not None:
                self._segments.append(Segment(self.node, self._activity, self._since, now))
        self._since = now


@dataclass
class StepFigures:
    """One update."""

    step: int
    committed_at: float
    groups: int
    samples: int
    tokens: float
    """Written by the model."""
    staleness: float
    """Mean over tokens: updates between the weights that wrote one and those that it trained."""
    oldest: int
    """Updates between the weights that started one of its groups and those that it trained, at most."""
    train_s: float
    waited_s: float
    """Of the gang for its batch, in all."""


@dataclass
class Result:
    """What a simulation measured."""

    pipeline: str
    nodes: int
    wall_s: float
    seconds: dict[Activity, float]
    """Node-seconds by activity."""
    steps: list[StepFigures]
    produced: int
    trained: int
    stale: int
    """Samples dropped because they were too old for every step to come."""
    pending: int
    tokens_stale: float
    switches: int
    failures: int = 0
    segments: list[Segment] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    policy: PipelinePolicy | None = None
    stands_for: int = 1
    """Real nodes for each simulated one."""
    real_s: float = 0.0
    """What the simulation took."""

    def _share(self, part: tuple[Activity, ...], of: tuple[Activity, ...]) -> float:
        whole = sum(self.seconds.get(a, 0.0) for a in of)
        return sum(self.seconds.get(a, 0.0) for a in part) / whole if whole else 0.0

    @property
    def idle_fraction(self) -> float:
        """1 - busy / held, over all nodes."""
        held = tuple(a for a in self.seconds if a != "down")
        return 1 - self._share(BUSY, held) if held else 0.0

    @property
    def switch_fraction(self) -> float:
        """The part of it that went into changes of role and loading of weights."""
        return self._share(("switch", "sync"), tuple(a for a in self.seconds if a != "down"))

    @property
    def idle_rollout(self) -> float:
        return 1 - self._share(("decode",), ROLLOUT) if self._share(ROLLOUT, ROLLOUT) else 0.0

    @property
    def idle_train(self) -> float:
        return 1 - self._share(("train",), TRAIN) if self._share(TRAIN, TRAIN) else 0.0

    @property
    def tokens(self) -> float:
        return sum(step.tokens for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens that the model wrote, of the whole cluster."""
        return self.tokens * self.stands_for / self.wall_s if self.wall_s else 0.0

    @property
    def staleness_mean(self) -> float:
        return sum(s.staleness * s.tokens for s in self.steps) / self.tokens if self.tokens else 0.0

    def figures(self) -> dict[str, float]:
        """The headline, as in the JSON line of the benchmark."""
        return {
            "idle_fraction": round(self.idle_fraction, 4),
            "idle_rollout": round(self.idle_rollout, 4),
            "idle_train": round(self.idle_train, 4),
            "switch_fraction": round(self.switch_fraction, 4),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "wall_s": round(self.wall_s, 1),
            "staleness_mean": round(self.staleness_mean, 3),
            "stale_share": round(self.stale / max(1, self.produced), 4),
        }
