"""Messages of the resource pool: nodes, requests for leases, and what the pool shows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workflows.messages.base import Message, Role
from workflows.scheduling.decision import Decision
from workflows.scheduling.devices import DeviceProfile
from workflows.spec import RunSpec, Tag


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
    shares: tuple[Tag, ...] = ()
    """Shared tags whose work it does now."""


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
    """What it has a lease for, or ``free``."""
    epoch: int
    lease: str | None
    shares: tuple[str, ...] = ()
    """Shared tags whose work it does beside that, for every run."""
    train_priority: float = 0.0
    why: str = ""
    """Why it does what it does now."""
    since: float = 0.0
    """Unix seconds of that decision."""
    rates: tuple[NodeRate, ...] = ()

    @property
    def does(self) -> str:
        """*Example*: ``rollout, agent``."""
        own = [] if self.activity == "free" and self.shares else [self.activity]
        return ", ".join([*own, *self.shares])


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

    def tagged(self, tag: str | None = None, activity: str | None = None) -> list[NodeStatus]:
        """Nodes that can do ``tag``; with ``activity`` those that do that tag's work now, or are ``free``."""
        return [n for n in self.nodes if tag in (None, *n.tags) and activity in (None, n.activity, *n.shares)]

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


PoolStatus.model_rebuild()
