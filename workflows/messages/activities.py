"""Inputs and results of activities."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from workflows.messages.base import CheckpointRef, ColumnRef, GangRole, ManifestRef, Message, WeightsRef
from workflows.messages.run import EvaluationOutcome
from workflows.scheduling.decision import Decision
from workflows.spec import RunSpec


class StreamInput(Message):
    """Input of the long activities ``stream_tasks`` and ``stream_rewards``.

    ``worker_slot`` names the place that runs the samples; a retry under the
    same slot first gives back what the lost attempt was running.
    """

    run: str
    stream: str
    worker_slot: str


class RunStart(Message):
    """Result of ``prepare_run``: where the run stands in the ledger."""

    lineage: int
    step: int
    checkpoint: CheckpointRef
    replay: tuple[ManifestRef, ...]
    evaluations: tuple[EvaluationOutcome, ...] = ()


class AdmissionInput(Message):
    """Input of ``admit_step``: what the run's pipeline lets start while ``step`` is made."""

    spec: RunSpec
    step: int
    paused: bool


class AdmissionRate(Message):
    """Input of ``set_rate``: sessions kept running in a stream; the rest of its admission stays."""

    run: str
    stream: str
    target_in_flight: int


class AdmissionPause(Message):
    """Input of ``pause_admission``: nothing new starts while True."""

    run: str
    stream: str
    paused: bool


class ClaimInput(Message):
    """Input of ``claim_batch``.

    ``cost_s``: of taking the train nodes from rollout for this batch, as measured lately; None: they are not taken
    for it, or nobody knows, and the batch is claimed as soon as it is complete.
    """

    spec: RunSpec
    lineage: int
    step: int
    version: int
    cost_s: float | None = None
    prefer: tuple[int, ...] = ()
    """Groups whose gradients are computed already: they go into the batch, and the run's selection adds the others."""
    since: float | None = None
    """Unix seconds when the step began to wait; None: when the activity was scheduled."""


class ClaimResult(Message):
    """A claimed batch, what was left out of it, in groups, and how it differs from what was left waiting.

    ``pending``: samples that are on their way. ``why``: the trigger. ``switch``: why not later.
    """

    manifest: ManifestRef
    groups: int
    zero_variance: int
    stale: int
    reward_mean: float | None
    reward_std: float | None
    waited_s: float
    pending: int = 0
    why: Decision | None = None
    switch: Decision | None = None
    length_bias: float | None = None
    age_bias: float | None = None


class PartInput(Message):
    """Input of ``next_part``: groups for ``step`` whose gradients can be computed ahead, but for those ``done``."""

    spec: RunSpec
    lineage: int
    step: int
    done: tuple[int, ...] = ()
    least: int | None = None
    """Groups that make a part; None: a fixed share of the step's."""


class PartResult(Message):
    """A manifest of complete groups that no step has claimed yet, and their ordinals."""

    manifest: ManifestRef
    ordinals: tuple[int, ...]


class FlowInput(Message):
    """Input of ``group_flow``: how groups come in for ``step``; ``nodes`` gave rollout back at ``since``."""

    spec: RunSpec
    step: int
    nodes: tuple[str, ...] = ()
    since: float = 0.0


class FlowView(Message):
    """A :class:`workflows.scheduling.switching.GroupFlow`, and when the nodes decoded again, in unix seconds."""

    ready: int
    wanted: int
    supply: int
    in_flight: int
    rate: float
    decoding: float | None = None


class RewindInput(Message):
    run: str
    from_lineage: int


class CommitInput(Message):
    """Input of ``commit_step``: the update's result, the batch's figures and each node's training interval."""

    run: str
    lineage: int
    step: int
    checkpoint: CheckpointRef
    metrics: dict[str, float]
    intervals: tuple[TrainInterval, ...]
    dropped: tuple[str, ...] = ()
    """Sessions of the batch that the update left out."""
    keep_weights: int = Field(default=4, ge=1)
    """Newest published versions that stay on disk."""
    keep_weights_every: int | None = None
    """Older versions that stay too: each so many."""


class TrainInterval(Message):
    """Unix seconds during which ``node`` trained, or had a companion of the policy at work."""

    node: str
    start: float
    end: float
    kind: Literal["train", "reference", "critic"] = "train"


class RouteInput(Message):
    """Input of ``put_route`` and ``close_route``: an engine that serves the weights of ``run``."""

    run: str
    lease: str
    epoch: int
    node: str
    url: str = ""
    engine_kind: str = ""
    version: int = 0
    state: Literal["open", "held"] = "open"


class EngineTask(Message):
    """Input of ``engine_supervise`` and ``engine_load``."""

    run: str
    lease: str
    epoch: int
    node: str
    spec: RunSpec
    weights: WeightsRef


class EngineHold(Message):
    """Input of ``engine_hold``: pause (True) or resume the node's engine."""

    run: str
    epoch: int
    node: str
    hold: bool


class GangProbe(Message):
    """Input of ``gang_probe``."""

    run: str
    node: str
    role: GangRole = "trainer"


class GangView(Message):
    """The resident ranks of one role on a node: which gang they belong to, if all of them live and are idle."""

    node: str
    gang: str | None
    ranks: int
    version: int | None = None
    """Weight version that all of them hold."""
    host: str = "127.0.0.1"
    """Where the other members reach this node."""
    free_port: int
    """A port for the rendezvous, should this node lead."""


class TrainerTask(Message):
    """Input of ``trainer_supervise``: one member of a gang."""

    run: str
    lease: str
    epoch: int
    node: str
    gang: str
    first_rank: int
    ranks: int
    world_size: int
    master_addr: str
    master_port: int
    checkpoint: CheckpointRef
    spec: RunSpec
    role: GangRole = "trainer"


class TrainTask(Message):
    """Input of ``train_step``: idempotent under (run, lineage, step)."""

    run: str
    lease: str
    epoch: int
    node: str
    gang: str
    lineage: int
    manifest: ManifestRef
    time_limit_s: float
    columns: tuple[ColumnRef, ...] = ()
    """What models that the gang does not hold say of the batch."""
    role: GangRole = "trainer"
    dropped: tuple[str, ...] = ()
    """Sessions that the policy's update left out, and the critic's does too."""


class ColumnsTask(TrainTask):
    """Input of ``compute_columns``: a share of a batch, for the model of ``role``. What is written stays."""

    share: int = 0
    shares: int = 1


class ColumnsOutcome(Message):
    """Result of ``compute_columns``: what was written, and when the node computed it."""

    column: ColumnRef
    busy: TrainInterval


class TrainOutcome(Message):
    """Result of ``train_step``; ``checkpoint`` comes from the member that has rank 0."""

    node: str
    start: float
    end: float
    checkpoint: CheckpointRef | None
    metrics: dict[str, float]
    dropped: tuple[str, ...] = ()
    """Sessions of the batch that were left out."""
    returns: ColumnRef | None = None
    """What a critic apart is to learn from the step."""


class NodeRun(Message):
    """Input of ``end_residency``: processes of ``run`` on ``node`` end."""

    run: str
    node: str


class EndRun(Message):
    """Input of ``finish_run``: samples left over end as ``filtered(run_ended)``."""

    run: str
    state: str


class BooksView(Message):
    balanced: bool
    produced: int
    trained: int


class AuditEntry(Message):
    """Input of ``record_command``: one human command."""

    run: str
    actor: str
    what: str
    why: str
    data: dict[str, Any] = Field(default_factory=dict)


class AuditInput(Message):
    """Input of ``audit_pool``."""

    pool: str


CommitInput.model_rebuild()
