"""Every message that crosses a workflow's border, one model each.

History holds ids, counts, decisions and checksums (invariant I8): no tokens,
prompts, addresses with secrets or keys are in any of these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from workflows.scheduling.decision import Decision
from workflows.scheduling.devices import DeviceProfile
from workflows.scheduling.switching import SwitchCost
from workflows.spec import RunSpec, Tag

Role = Literal["engine", "trainer"]


class Message(BaseModel):
    """Base of every message: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamInput(Message):
    """Input of the long activities ``stream_tasks`` and ``stream_rewards``.

    ``worker_slot`` names the place that runs the samples; a retry under the
    same slot first gives back what the lost attempt was running.
    """

    run: str
    stream: str
    worker_slot: str


class WeightsRef(Message):
    """Published weights: the directory engines load and the digest they must confirm."""

    version: int
    path: str
    digest: str


class CheckpointRef(Message):
    """The newest committed checkpoint of a run; ``path`` is None for the initial model."""

    lineage: int
    step: int
    version: int
    path: str | None
    digest: str
    weights: WeightsRef


class ManifestRef(Message):
    """A claimed batch: its step, the manifest object and the digest recorded in history."""

    step: int
    key: str
    digest: str


# --- pool ------------------------------------------------------------------------------------------------------------


class NodeInfo(Message):
    """Update ``add_node``: a node agent (re-)registers its node.

    ``epoch`` is the highest epoch the node remembers, so that epochs keep
    growing even if the pool's own history is lost.
    """

    id: str
    tags: frozenset[Tag]
    train_priority: float | None = None
    """None: as the node is measured."""
    boot_id: str
    epoch: int = 0


class NodeCommand(Message):
    """What every human command on a node carries into the audit table."""

    node: str
    actor: str = "unknown"
    why: str = ""


class NodeName(NodeCommand):
    """Updates ``remove_node`` and ``lose_node``: one node, by id."""


class SetTags(NodeCommand):
    """Update ``set_tags``: replace a node's capability tags."""

    tags: frozenset[Tag]


class PreemptNode(NodeCommand):
    """Update ``preempt``: take the node's lease away; with ``hold`` it stays free until ``set_tags`` or drain undo."""

    reason: str = Field(min_length=1)
    hold: bool = False


class DrainNode(NodeCommand):
    """Update ``drain``: end the node's lease and grant nothing on it; ``undo`` takes it back into service."""

    undo: bool = False


class SetShare(Message):
    """Update ``set_share``: what a run may have of the pool from now on, whatever its run file says."""

    run: str
    priority: int = 0
    quota: int | None = Field(default=None, ge=1)
    actor: str = "unknown"
    why: str = ""


class ProfileTask(Message):
    """Input of ``ProfileNode``: measure ``node`` with the model in ``model``."""

    node: str
    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default=1, ge=1)
    cores: tuple[int, ...] = ()


class NodeRate(Message):
    """Tokens/s of a node in one role: as the roofline predicts them, and as they are. None: not known (yet)."""

    role: Literal["decode", "train"]
    predicted: float | None = None
    measured: float | None = None
    error: float | None = None
    """Mean of |predicted / measured - 1| over the last measurements."""


class NodeProfiled(Message):
    """A measured node: result of ``ProfileNode``, signal ``profiled`` of the pool."""

    node: str
    model: str
    device: DeviceProfile
    train_priority: float
    rates: tuple[NodeRate, ...]
    """Predicted under a usual load; the errors are of loads that were not fitted."""


class NodeSeen(Message):
    """Signal ``node_seen`` (alive) and ``node_lost`` (known to be dead)."""

    node: str
    boot_id: str
    rates: tuple[NodeRate, ...] = ()
    """Of the work that it does now."""


class LeaseRequest(Message):
    """Signal ``request``: somebody wants nodes in a role.

    ``count`` None: a *standing* request, one lease on every candidate node
    with ``tag``, renewed whenever a node comes back. ``count`` n: one gang of
    n nodes, all or nothing, granted once. Higher ``priority`` pre-empts lower.
    """

    request_id: str
    run: str
    role: Role
    tag: Tag
    candidates: tuple[str, ...]
    count: int | None
    priority: int
    owner: str
    """Workflow that is told what becomes of the lease."""
    spec: RunSpec


class QueueNotice(Message):
    """Signal ``queued``: the pool tells the owner of a request what it waits for."""

    request_id: str
    waiting_for: str


class WithdrawRequest(Message):
    """Signal ``withdraw``: the request is over; its leases are revoked."""

    request_id: str
    reason: str


class ReleaseLease(Message):
    """Signal ``release``: a lease has ended."""

    lease: str
    epoch: int


class NodeStatus(Message):
    node: str
    tags: tuple[str, ...]
    health: str
    activity: str
    epoch: int
    lease: str | None
    train_priority: float = 0.0
    why: str = ""
    """Why it does what it does now."""
    since: float = 0.0
    """Unix seconds of that decision."""
    rates: tuple[NodeRate, ...] = ()


class RequestStatus(Message):
    """A demand of a run. ``waiting_for``: empty once it has a lease."""

    request_id: str
    run: str
    role: str
    owner: str
    waiting_for: str


class ShareStatus(Message):
    """A run's place in the queue for nodes, and what it holds."""

    run: str
    priority: int
    quota: int | None
    holds: int


class PoolStatus(Message):
    """Answer of the pool's query ``status``."""

    cluster: str
    nodes: tuple[NodeStatus, ...]
    requests: tuple[RequestStatus, ...]
    """In the order in which they are served."""
    shares: tuple[ShareStatus, ...]
    decisions: tuple[Decision, ...]
    leases: tuple[LeaseStatus, ...]

    def node(self, name: str) -> NodeStatus | None:
        return next((node for node in self.nodes if node.node == name), None)


class LeaseStatus(Message):
    lease: str
    epoch: int
    run: str
    role: Role
    members: tuple[str, ...]
    owner: str
    state: str


# --- leases ----------------------------------------------------------------------------------------------------------


class LeaseInput(Message):
    """Input of the ``Lease`` workflow."""

    lease: str
    epoch: int
    run: str
    role: Role
    members: tuple[str, ...]
    owner: str
    pool: str
    spec: RunSpec


class Revoke(Message):
    """Signal ``revoke``: park and end."""

    reason: str


class MemberLost(Message):
    """Signal ``member_lost``: the node is known to be dead; it is fenced, not waited for."""

    node: str
    reason: str


class HoldLease(Message):
    """Signal ``hold``: close an engine's route and pause it (True), or let it serve again (False)."""

    hold: bool


class MemberReport(Message):
    """Signal ``member_report``: a supervisor says how its member is.

    ``version`` and ``url`` are an engine's; ``gang`` is a trainer's. ``seq``
    grows per process start, so that a late report changes nothing.
    """

    node: str
    state: Literal["ready", "down"]
    seq: float
    version: int | None = None
    url: str | None = None
    gang: str | None = None
    detail: str = ""


class LeaseEvent(Message):
    """Signals ``granted``, ``lease_report``, ``revoked`` and ``lease_lost`` to a lease's owner."""

    lease: str
    epoch: int
    role: Role
    members: tuple[str, ...]
    state: Literal["granted", "ready", "down", "revoked", "lost"]
    version: int | None = None
    gang: str | None = None
    reason: str = ""


class LeaseView(Message):
    """Answer of a lease's query ``status``."""

    lease: str
    epoch: int
    phase: str
    version: int | None
    route: str
    waiting_for: str
    last_failure: str


# --- run and step ----------------------------------------------------------------------------------------------------


class Pause(Message):
    """Update ``pause``: ``drain`` lets running sessions end, ``now`` cuts them (they continue after ``resume``)."""

    mode: Literal["drain", "now"] = "drain"
    give_back: bool = False
    actor: str = "unknown"
    why: str = ""


class Command(Message):
    """Updates ``resume`` and ``checkpoint_now``: who asks, and why."""

    actor: str = "unknown"
    why: str = ""


class Stop(Message):
    """Update ``stop``: ``drain`` finishes the current step and evaluates, ``now`` ends at once."""

    mode: Literal["drain", "now"] = "drain"
    actor: str = "unknown"
    why: str = ""


class SetParams(Message):
    """Update ``set_params``: new values by section, e.g. ``{"pipeline": {"steps": 40}}``."""

    patch: dict[str, dict[str, Any]]
    actor: str = "unknown"
    why: str = ""


class PolicyView(Message):
    """The fields of a pipeline's policy, which workflows act on; its methods are called by activities only."""

    name: str
    staleness: int
    trainers: Literal["preempt", "own"]
    holds_rollout: bool
    waits_for_sync: bool
    accumulates: bool


class StepInput(Message):
    """Input of ``RlStep``. ``replay``: train on this claimed manifest instead of claiming a new batch.

    ``owner``: the run, which owns the gang's lease. ``gang``: the lease that it kept from an earlier step, ready.
    """

    spec: RunSpec
    lineage: int
    step: int
    version: int
    pool: str
    owner: str
    policy: PolicyView
    paused: bool = False
    replay: ManifestRef | None = None
    gang: LeaseEvent | None = None
    cost: SwitchCost = SwitchCost()


class StepResult(Message):
    """``trained``: ``checkpoint`` is committed. ``gang_lost``: replay the claimed batch. ``stopped``: told to stop.
    ``data_ended``: there is no batch any more.

    ``taken``: why the gang was taken when it was. ``release_s``, ``load_s``: what that took; None where it was kept.
    """

    outcome: Literal["trained", "gang_lost", "stopped", "data_ended"]
    step: int
    checkpoint: CheckpointRef | None = None
    metrics: dict[str, float] = {}
    reason: str = ""
    taken: Decision | None = None
    claimed_at: float | None = None
    """Unix seconds when the batch was claimed; None for a replay."""
    release_s: float | None = None
    load_s: float | None = None


class StepUpdating(Message):
    """Signal ``updating`` of a run: a step has its batch and makes its update; ``leftover`` samples still run."""

    step: int
    leftover: int


class SwitchRecord(Message):
    """A decision on a change of roles: what it was predicted to gain and, once that is known, what it gained."""

    step: int
    decision: Decision
    at: float
    """Unix seconds."""
    measured_gain_s: float | None = None


class StepStatus(Message):
    """Answer of a step's query ``status``."""

    lineage: int
    step: int
    phase: str
    waiting_for: str
    manifest: ManifestRef | None
    lease: str | None


class EvaluationInput(Message):
    """Input of ``Evaluation`` and its activities."""

    spec: RunSpec
    version: int

    @property
    def run(self) -> str:
        return self.spec.run


class EvaluationOutcome(Message):
    """Mean raw reward of the held-out samples at one weight version; None if none was scored."""

    version: int
    mean: float | None
    samples: int
    failed: int = 0
    """Samples without a reward; they are in no mean."""
    pass_at: dict[int, float] = {}
    """pass@k by k, over the tasks that have k rewards."""


class EngineView(Message):
    """What a run knows of one of its engine leases."""

    lease: str
    epoch: int
    node: str
    state: Literal["granted", "ready", "down"] = "granted"
    version: int | None = None
    told: int | None = None
    """Weight version it was told to load."""
    held: bool = False


class RunState(Message):
    """What ``TrainingRun`` carries through continue-as-new."""

    model_config = ConfigDict(extra="forbid", frozen=False)

    opened: bool = False
    """Whether there is something to close when the run ends."""
    started: bool = False
    data_ended: bool = False
    lineage: int = 0
    step: int = 0
    phase: str = "starting"
    checkpoint: CheckpointRef | None = None
    engines: dict[str, EngineView] = Field(default_factory=dict)
    replay: tuple[ManifestRef, ...] = ()
    paused: Pause | None = None
    stopping: Stop | None = None
    engines_wanted: bool = False
    engine_request: str = ""
    """Id of the standing request for engines; a new one after each give-back."""
    queue_notice: str = ""
    """What the pool says that this request waits for."""
    evaluations: tuple[EvaluationOutcome, ...] = ()
    spared: str = ""
    """Engine lease that stays at the weights ``spared_for`` for their evaluation beside training; empty: none."""
    spared_for: WeightsRef | None = None
    last_metrics: dict[str, float] = Field(default_factory=dict)
    last_failure: str = ""
    policy: PolicyView | None = None
    """As of the last boundary between two steps."""
    gang: LeaseEvent | None = None
    """The trainer lease, from its grant to its end."""
    updating: bool = False
    """Whether the step in work has its batch."""
    leftover: int = 0
    """Samples that run on although their batch is being trained, and are held."""
    returned_at: float | None = None
    """Unix seconds when the train nodes were given back, until all of them serve again."""
    serving_at: float | None = None
    """Unix seconds when they did, until it is known when they decoded again."""
    cost: SwitchCost = SwitchCost()
    """Of taking the train nodes from rollout and giving them back, as measured lately."""
    switches: tuple[SwitchRecord, ...] = ()
    """The last decisions to change roles, or not to."""
    losses: int = 0
    """Times the trainer gang was lost since the last committed step."""
    engine_losses: int = 0
    """Times an engine lease was lost since an engine was last ready."""


class RunInput(RunSpec):
    """Input of ``TrainingRun``: a run file, and what an earlier execution of it handed over.

    One object, because Temporal keeps types only when it is given every argument, and a user gives one JSON.
    """

    carried: RunState | None = None
    """Leave it out: continue-as-new fills it."""

    def run_file(self) -> RunSpec:
        """The run file alone."""
        return RunSpec.model_validate(self.model_dump(exclude={"carried"}))


class RunStatus(Message):
    """Answer of a run's query ``status``."""

    run: str
    phase: str
    lineage: int
    step: int
    steps: int
    version: int
    paused: str | None
    stopping: str | None
    waiting_for: str
    engines: tuple[EngineView, ...]
    evaluations: tuple[EvaluationOutcome, ...]
    metrics: dict[str, float]
    last_failure: str
    warning: str = ""
    """Something is odd about the last step though nothing failed."""
    pipeline: str = ""
    gang: str | None = None
    """The trainer lease and its epoch, while there is one."""
    switch_cost: SwitchCost = SwitchCost()
    switches: tuple[SwitchRecord, ...] = ()


class RunResult(Message):
    """Result of ``TrainingRun``."""

    run: str
    steps: int
    version: int
    reward_before: float | None
    reward_after: float | None
    balanced: bool
    stopped: bool


# --- activities ------------------------------------------------------------------------------------------------------


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
    keep_weights: int = Field(default=4, ge=1)
    """Newest published versions that stay on disk."""
    keep_weights_every: int | None = None
    """Older versions that stay too: each so many."""


class TrainInterval(Message):
    """Unix seconds during which ``node`` trained."""

    node: str
    start: float
    end: float


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


class GangView(Message):
    """The resident ranks of one node: which gang they belong to, if all of them live and are idle or training."""

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


class TrainOutcome(Message):
    """Result of ``train_step``; ``checkpoint`` comes from the member that has rank 0."""

    node: str
    start: float
    end: float
    checkpoint: CheckpointRef | None
    metrics: dict[str, float]


class Wake(Message):
    """Signal ``wake``: something the run waits for may have changed; ``what`` names it, the ledger has the facts."""

    what: Literal["data_stopped", "data_failed", "look"] = "look"
    detail: str = ""


class StreamRate(Message):
    """Signal ``rate`` of the data stream: sessions kept running."""

    target_in_flight: int = Field(ge=1)


class StepPause(Message):
    """Signal ``pause`` of a step: claim nothing while True."""

    paused: bool


class DataInput(Message):
    """Input of ``DataStream``."""

    run: str
    owner: str
    target_in_flight: int


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
    data: dict[str, Any] = {}


class AuditInput(Message):
    """Input of ``audit_pool``."""

    pool: str


PoolStatus.model_rebuild()
CommitInput.model_rebuild()
