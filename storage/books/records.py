"""What the ledger takes and returns: frozen records, plain data, no SQL.

A *stream* is ``"train"`` or ``"eval/<version>"``. Times are unix seconds.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

TRAIN = "train"
"""The stream whose groups are trained on."""


END_OF_DATA = "end_of_data"
"""Cause with which samples fail for which there is no task: a source told only then that it had ended."""


class State(enum.StrEnum):
    """Where a sample stands. The last three are terminal: nothing leaves them."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    SCORED = "scored"
    GROUPED = "grouped"
    CLAIMED = "claimed"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"


TERMINAL = (State.TRAINED, State.FILTERED, State.FAILED)
PENDING = tuple(state for state in State if state not in TERMINAL)


@dataclass(frozen=True, order=True)
class SampleKey:
    """One of the G samples of one task, e.g. ``SampleKey("demo", "train", 17, 3)``."""

    run: str
    stream: str
    ordinal: int
    sample: int

    def __str__(self) -> str:
        return f"{self.run}/{self.stream}/{self.ordinal}.{self.sample}"


@dataclass(frozen=True)
class SampleClaim:
    """The right to run ``attempt`` of a sample; a later attempt makes it stale."""

    key: SampleKey
    attempt: int


@dataclass(frozen=True)
class ReleasedSample:
    """An attempt that ended because its worker was lost. ``session`` is its proxy session, if it had one.

    ``next_attempt`` is None where the attempts were exhausted and the sample failed.
    """

    key: SampleKey
    attempt: int
    session: str | None
    next_attempt: int | None


@dataclass(frozen=True)
class ScoreClaim:
    """A finished attempt that waits for its reward."""

    key: SampleKey
    attempt: int
    session: str
    output: Any


@dataclass(frozen=True)
class SampleRow:
    """A sample as it stands; fields of later states are None until then.

    ``tokens`` are the trainable tokens of its session in the shard; ``lineage`` and ``step`` say which update took it.
    """

    key: SampleKey
    attempt: int
    state: State
    cause: str | None
    detail: str | None
    worker: str | None
    session: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    turns: int | None
    min_version: int | None
    max_version: int | None
    output: Any
    reward: float | None
    tokens: int | None
    lineage: int | None
    step: int | None


@dataclass(frozen=True)
class GroupRows:
    """A complete group without a shard: every sample is scored or terminal, at least one is scored."""

    run: str
    stream: str
    ordinal: int
    rows: tuple[SampleRow, ...]

    @property
    def scored(self) -> tuple[SampleRow, ...]:
        """The samples that belong into the shard."""
        return tuple(row for row in self.rows if row.state is State.SCORED)


@dataclass(frozen=True)
class RunInfo:
    """A run. ``state`` is free text of the orchestration; ``stopped`` is the time it ended, None while it lives."""

    run: str
    spec: Mapping[str, Any]
    spec_digest: str
    created: float
    state: str
    stopped: float | None
    lineage: int


@dataclass(frozen=True)
class Admission:
    """What may start in a stream. ``produced`` counts the samples that were ever started."""

    run: str
    stream: str
    admit_until: int
    target_in_flight: int
    samples_per_task: int
    paused: bool
    produced: int
    per_route: int | None = None
    """Sequences that the engine behind an open route decodes together; bounds what runs. None: nobody knows."""
    fresh_from: int | None = None
    """Tasks from this ordinal on wait until most engines serve weight version ``fresh_version``. None: none does."""
    fresh_version: int | None = None


@dataclass(frozen=True)
class GroupRef:
    """A shard in a batch; ``samples``, ``sessions`` and ``rewards`` are aligned."""

    ordinal: int
    shard_key: str
    sha256: str
    samples: tuple[int, ...]
    sessions: tuple[str, ...]
    rewards: tuple[float, ...]
    start_version: int | None


@dataclass(frozen=True)
class WaitingGroup:
    """A complete group that no step has claimed yet: what a batch is selected from.

    ``completed`` is unix seconds, 0 where it is not known; ``tokens`` are the trainable tokens of its samples.
    """

    ordinal: int
    start_version: int
    rewards: tuple[float, ...]
    completed: float
    tokens: int


class Flow(NamedTuple):
    """How groups of the training stream come in.

    ``ready``: complete and not too old. ``in_flight``: begun and not complete. ``supply``: not complete, those that may
    still begin included. ``rate``: completed per second, by the last few; 0 where nobody knows.
    """

    ready: int
    in_flight: int
    supply: int
    rate: float


@dataclass(frozen=True)
class BatchClaim:
    """The groups of one step, in ordinal order.

    ``groups`` leaves out the ``zero_variance`` groups that were dropped, though
    they count towards the step: it can be empty. ``stale`` groups were dropped
    and replaced. Mean and (population) standard deviation are over the rewards
    of all samples of all groups that counted, dropped zero-variance ones included.
    """

    run: str
    lineage: int
    step: int
    groups: tuple[GroupRef, ...]
    zero_variance: int
    stale: int
    reward_mean: float
    reward_std: float


class ManifestRef(NamedTuple):
    """A manifest object in the store."""

    key: str
    digest: str


class RewoundStep(NamedTuple):
    """A claimed step that has to be trained again; without a manifest where the crash came before it was written."""

    step: int
    manifest_key: str | None
    digest: str | None


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: ``step`` turned its weights into ``version``."""

    run: str
    lineage: int
    step: int
    version: int
    path: str
    digest: str
    weights_path: str
    weights_digest: str
    metrics: Mapping[str, Any]
    created: float
    critic_path: str | None = None
    """State of a critic with nodes of its own after the same step; None where there is none."""
    critic_digest: str | None = None


@dataclass(frozen=True)
class Books:
    """Where every sample of a run is: ``produced = trained + filtered + failed + pending`` (I4).

    ``produced`` is counted where samples are started, the rest where they are.
    ``problems`` names each disagreement; ``balanced`` is true when there is none.
    """

    produced: int
    trained: int
    filtered: Mapping[str, int]
    failed: Mapping[str, int]
    pending: Mapping[str, int]
    problems: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Failure:
    """Attempts of a run that ended without a result for one ``cause``, those that were tried again included.

    ``detail`` says what happened to the last of them: attempt ``attempt`` of ``key``, whose proxy session was
    ``session``; it is the end of a traceback or of an error output.
    """

    cause: str
    attempts: int
    key: SampleKey
    attempt: int
    session: str | None
    detail: str
    ended: float


@dataclass(frozen=True)
class EvalResult:
    """Rewards of an evaluation; ``failed`` samples have none."""

    rewards: tuple[tuple[float, ...], ...]
    """Of each task by ordinal, its samples in order."""
    failed: int

    @property
    def n(self) -> int:
        """Rewards there are."""
        return sum(map(len, self.rewards))

    @property
    def mean(self) -> float | None:
        """Over all samples; None without rewards."""
        return fmean(reward for of_task in self.rewards for reward in of_task) if self.n else None


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one update."""

    run: str
    lineage: int
    step: int
    metrics: Mapping[str, Any]
    recorded: float


@dataclass(frozen=True)
class Interval:
    """``node`` was busy with ``kind`` ("generate" or "train") from ``start`` to ``end``."""

    node: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class AuditEntry:
    """A human command: who did what, when and why."""

    at: float
    actor: str
    what: str
    why: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Route:
    """Where generations of a run may start: an engine that serves its weights, by the lease that owns it."""

    lease: str
    run: str
    node: str
    url: str
    engine_kind: str
    epoch: int
    version: int
    state: str
    """"open", "held" or "closed"."""


@dataclass(frozen=True)
class SessionRecord:
    """A proxy session, bound to one attempt of one sample (``key`` is None for a session of a remote agent)."""

    session: str
    key_hash: str
    run: str
    key: SampleKey | None
    attempt: int
    policy: Mapping[str, Any] = field(default_factory=dict)
    closed: bool = False
    parent: str | None = None
    """The session on whose behalf this one was opened, e.g. that of a sub-agent's agent."""
    label: str | None = None
    """What its maker calls it."""
    created: float = field(default_factory=time.time)
    ended: float | None = None
    """When it was closed."""
    proxy: str | None = None
    """Process id, as in :class:`ProxyRecord`, of the proxy that owns it; None: nobody has taken it yet."""
    reward: float | None = None
    """Of a session outside the sample queue; that of a sample is the sample's."""
    reward_cause: str | None = None
    """Why there is no reward, or how it came about."""
    collected: int | None = None
    """Sampled tokens the journal held of it when its records were removed; None: they were not."""


@dataclass(frozen=True)
class ProxyRecord:
    """A proxy process: ``proxy`` is its id, new for every start, ``url`` where other processes reach it.

    It lives until ``lease_until``, by the database's clock. ``routes_seen`` is the newest generation of the routes
    that it acts on.
    """

    proxy: str
    url: str
    lease_until: float
    routes_seen: int


class RouteTable(NamedTuple):
    """All routes, by lease, as of ``generation``, which every change of them raises."""

    generation: int
    routes: tuple[Route, ...]
