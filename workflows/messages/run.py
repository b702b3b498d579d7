"""Messages of a run, its steps and its data stream: commands, state and what they show."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from workflows.messages.base import CheckpointRef, GangRole, ManifestRef, Message, WeightsRef
from workflows.messages.lease import LeaseEvent
from workflows.scheduling.decision import Decision
from workflows.scheduling.recall import Recall
from workflows.scheduling.switching import SwitchCost
from workflows.spec import RunSpec


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


class CompanionView(Message):
    """What a run knows of a lease of a reference or critic apart from the trainer."""

    lease: str
    epoch: int
    role: GangRole
    members: tuple[str, ...]
    state: Literal["granted", "ready"] = "granted"
    gang: str = ""


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
    companions: tuple[CompanionView, ...] = ()
    """Leases of reference and critic, as of now."""
    recall: int = 0
    """Complete groups at which a gang that is not kept is called to accumulate them; 0: it is called at once."""


class StepResult(Message):
    """``trained``: ``checkpoint`` is committed. ``gang_lost``: replay the claimed batch. ``stopped``: told to stop.
    ``data_ended``: there is no batch any more.

    ``taken``: why the gang was taken when it was. ``release_s``, ``load_s``: what that took; None where it was kept.
    """

    outcome: Literal["trained", "gang_lost", "stopped", "data_ended"]
    step: int
    checkpoint: CheckpointRef | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    reason: str = ""
    taken: Decision | None = None
    claimed_at: float | None = None
    """Unix seconds when the batch was claimed; None for a replay."""
    release_s: float | None = None
    load_s: float | None = None
    trained_s: float = 0.0
    """How long the gang computed, ahead of the batch and on it."""
    rollout_s: float = 0.0
    """From the beginning of the step until its batch was claimed."""
    called: bool = False
    """Whether it was called from rollout to accumulate, rather than kept."""
    waited_s: float | None = None
    """How long it waited for groups while it was there; None where it did not accumulate."""


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
    companions: tuple[CompanionView, ...] = ()
    """Leases of reference and critic that it knows of."""


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
    pass_at: dict[int, float] = Field(default_factory=dict)
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
    guests: tuple[str, ...] = ()
    """Nodes that have served the run though its file does not name them."""
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
    recall: Recall = Recall()
    """When train nodes are called to accumulate a batch."""
    trained_s: float = 0.0
    """How long the gang computed in the last step."""
    losses: int = 0
    """Times the trainer gang was lost since the last committed step."""
    engine_losses: int = 0
    """Times an engine lease was lost since an engine was last ready."""
    companions: dict[str, CompanionView] = Field(default_factory=dict)
    """Leases of reference and critic, by lease."""
    companion_requests: dict[str, str] = Field(default_factory=dict)
    """By role, the id of the standing request for its nodes, while they are wanted."""
    companion_notices: dict[str, str] = Field(default_factory=dict)
    """By role, what the pool says that this request waits for."""
    companion_losses: int = 0
    """Times such a lease was lost since the last committed step."""


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
    step_running: str | None = None
    """Workflow id of the step in work, which knows more of what the run waits for."""
    queue_notice: str = ""
    """What the pool says that a request of the run waits for; part of ``waiting_for``."""
    companions: tuple[CompanionView, ...] = ()
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
