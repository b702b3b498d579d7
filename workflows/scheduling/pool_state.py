"""What a pool is made of: nodes, demands, shares of runs, leases, and the actions that the world owes to it.

Values only; :mod:`workflows.scheduling.pool` says how they change.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from workflows.scheduling.decision import Decision

KEPT_DECISIONS = 20
SHARED_TAGS = ("agent", "reward")
"""Tags whose work takes no lease: a node does it beside what its lease says, for every run."""

Health = Literal["up", "lost", "held", "draining", "leaving"]
LeaseState = Literal["held", "revoking"]


class Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Node(Value):
    """A machine, or one GPU set, that one node agent owns."""

    id: str
    tags: frozenset[str]
    """What the node can do."""
    registered: frozenset[str] = frozenset()
    """The tags that its agent last registered; tags that a person set since stay while the agent says the same."""
    train_priority: float | None = None
    """Order in which nodes are taken for training, highest first; None: as measured."""
    measured_priority: float = 0.0
    """The roofline's ``train_priority`` of the node's device profile; 0 before it is profiled."""
    boot_id: str = ""
    epoch: int = 0
    """Highest epoch ever granted on this node."""
    health: Health = "up"
    """``held``: taken away by hand. ``draining``: nothing is granted. ``leaving``: removed as soon as it is free."""
    found_again: Health = "up"
    """Health of a lost node once it is seen again: what a human took away stays away."""
    last_seen: float = 0.0
    shares: frozenset[str] = frozenset()
    """Shared tags whose work it does now, as its agent last said."""
    why: str = ""
    """Why it does what it does now."""
    since: float = 0.0
    """Unix seconds of that decision."""

    @property
    def order(self) -> float:
        return self.measured_priority if self.train_priority is None else self.train_priority


class Share(Value):
    """What one run may have. Runs are served by ``priority``, then in order of arrival."""

    priority: int = 0
    quota: int | None = None
    """Nodes it may claim while others want them; beyond, it borrows what nobody wants. None: no limit."""
    arrived: int = 0
    by_hand: bool = False
    """Set by a person: requests of the run do not change it."""


class Demand(Value):
    """Somebody wants nodes. ``count`` None: a standing demand for every matching node, one lease each."""

    request_id: str
    run: str
    role: str
    tag: str
    candidates: frozenset[str] = frozenset()
    """Node ids that may be used; empty allows all."""
    count: int | None = None
    priority: int = 0
    """Among the demands of one run."""
    owner: str = ""
    arrived: int = 0
    passed: int = 0
    """Grants to later ones, on nodes this demand could use, since its last grant."""


class Lease(Value):
    """The right to use ``members`` in one role until revoked; ``epoch`` fences older holders."""

    id: str
    epoch: int
    request_id: str
    run: str
    role: str
    tag: str
    """Activity tag of its members."""
    members: tuple[str, ...]
    owner: str
    priority: int
    protected: bool = False
    """Granted to a run that had waited long: not taken by a run with a higher priority."""
    state: LeaseState = "held"
    promised: str = ""
    """Request for which it is asked back: its members are kept for that one."""

    @property
    def key(self) -> str:
        return f"{self.id}/{self.epoch}"


class Grant(Value):
    """Start the lease."""

    kind: Literal["grant"] = "grant"
    lease: Lease


class Revoke(Value):
    """Tell the lease to park and end."""

    kind: Literal["revoke"] = "revoke"
    lease: Lease
    reason: str


class Fence(Value):
    """Tell the lease that a member is dead: it must end without waiting for it."""

    kind: Literal["fence"] = "fence"
    lease: Lease
    node: str
    reason: str


Action = Grant | Revoke | Fence


class Pool(Value):
    """All that a cluster's pool knows. Small: about half a kilobyte a node."""

    cluster: str = "local"
    nodes: dict[str, Node] = {}
    demands: dict[str, Demand] = {}
    leases: dict[str, Lease] = {}
    """By ``id/epoch``."""
    shares: dict[str, Share] = {}
    """By run, while it has demands or leases, or somebody set its share."""
    serial: int = 0
    now: float = 0.0
    """Unix seconds of the last event."""
    last_tick: float = 0.0
    decisions: tuple[Decision, ...] = ()
    seen_requests: tuple[str, ...] = ()

    def lease_of(self, node: str) -> Lease | None:
        """The lease that ``node`` is a member of."""
        return next((lease for lease in self.leases.values() if node in lease.members), None)

    def leases_for(self, request_id: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.request_id == request_id]

    def share(self, run: str) -> Share:
        return self.shares.get(run, Share())

    def held_by(self, run: str) -> set[str]:
        """Nodes in leases of ``run`` that nobody has asked back yet."""
        held = (lease for lease in self.leases.values() if lease.run == run and lease.state == "held")
        return {node for lease in held for node in lease.members}

    def tagged(self, tag: str, *, activity: str | None = None) -> list[Node]:
        """Nodes that can do ``tag``; with ``activity`` those that now do that tag's work, or are ``free``."""
        found = [node for node in self.nodes.values() if tag in node.tags]
        return [node for node in found if activity in (None, self.activity(node.id), *node.shares)]

    def activity(self, node: str) -> str:
        """The node's activity tag: what it has a lease for, or ``free``; :attr:`Node.shares` is beside it."""
        lease = self.lease_of(node)
        return lease.tag if lease else "free"

    def shared_work(self, node: str) -> list[str]:
        """Tags whose shared work the node should do now; none for one that is drained, held back or gone."""
        known = self.nodes.get(node)
        return [] if known is None or known.health != "up" else sorted(known.tags & set(SHARED_TAGS))


class Outcome(NamedTuple):
    """The pool after a transition, and what has to be done because of it, in order."""

    pool: Pool
    actions: list[Action]


# --- copies with one thing changed -----------------------------------------------------------------------------------


def with_node(pool: Pool, node: Node) -> Pool:
    return pool.model_copy(update={"nodes": {**pool.nodes, node.id: node}})


def with_lease(pool: Pool, lease: Lease) -> Pool:
    return pool.model_copy(update={"leases": {**pool.leases, lease.key: lease}})


def explained(pool: Pool, decision: Decision, nodes: tuple[str, ...] = ()) -> Pool:
    """Note a decision, and on each of ``nodes`` why it does what it does from now on."""
    noted = {n: pool.nodes[n].model_copy(update={"why": decision.line(), "since": pool.now}) for n in nodes}
    kept = (*pool.decisions, decision)[-KEPT_DECISIONS:]
    return pool.model_copy(update={"nodes": {**pool.nodes, **noted}, "decisions": kept})
