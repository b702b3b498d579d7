"""The resource pool as a value: nodes, demands, leases, and transitions between such values.

A transition takes a pool and returns :class:`Outcome`: the next pool and the
actions the world owes to it. Nothing here waits, reads a clock or knows
Temporal; the ``ResourcePool`` workflow and the simulator drive the same code.

Rules
    * a node is in at most one lease; a lease's epoch is above every earlier epoch of its members;
    * a gang is granted as a whole or not at all;
    * a higher priority takes nodes from a lower one by *revoking* its lease; the nodes are granted once it has ended;
    * a demand that was passed over :data:`PATIENCE` times goes first, whatever its priority.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

PATIENCE = 8
"""Grants to others that a demand tolerates before it goes first."""
KEPT_DECISIONS = 20
KEPT_REQUESTS = 200

Health = Literal["up", "lost", "held", "draining", "leaving"]
LeaseState = Literal["held", "revoking"]


class Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Node(Value):
    """A machine, or one GPU set, that one node agent owns."""

    id: str
    tags: frozenset[str]
    """What the node can do."""
    train_priority: float = 0.0
    """Order in which nodes are taken for training, highest first."""
    boot_id: str = ""
    epoch: int = 0
    """Highest epoch ever granted on this node."""
    health: Health = "up"
    """``held``: taken away by hand. ``draining``: nothing is granted. ``leaving``: removed as soon as it is free."""
    found_again: Health = "up"
    """Health of a lost node once it is seen again: what a human took away stays away."""
    last_seen: float = 0.0


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
    owner: str = ""
    arrived: int = 0
    passed: int = 0
    """Grants to others, on nodes this demand could use, since its last grant."""


class Lease(Value):
    """The right to use ``members`` in one role until revoked; ``epoch`` fences older holders."""

    id: str
    epoch: int
    request_id: str
    run: str
    role: str
    tag: str
    members: tuple[str, ...]
    owner: str
    priority: int
    state: LeaseState = "held"

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


class Explained(Value):
    """A decision and the facts it used."""

    what: str
    why: str


class Pool(Value):
    """All that a cluster's pool knows. Small: about half a kilobyte a node."""

    cluster: str = "local"
    nodes: dict[str, Node] = {}
    demands: dict[str, Demand] = {}
    leases: dict[str, Lease] = {}
    """By ``id/epoch``."""
    serial: int = 0
    last_tick: float = 0.0
    decisions: tuple[Explained, ...] = ()
    seen_requests: tuple[str, ...] = ()

    def lease_of(self, node: str) -> Lease | None:
        """The lease that ``node`` is a member of."""
        return next((lease for lease in self.leases.values() if node in lease.members), None)

    def leases_for(self, request_id: str) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.request_id == request_id]


class Outcome(NamedTuple):
    """The pool after a transition, and what has to be done because of it, in order."""

    pool: Pool
    actions: list[Action]


# --- nodes -----------------------------------------------------------------------------------------------------------


def add_node(pool: Pool, node: Node, now: float) -> Outcome:
    """A node registers, or registers again after its agent restarted: it keeps its lease and its epoch grows only."""
    known = pool.nodes.get(node.id)
    epoch = max(node.epoch, known.epoch) if known else node.epoch
    before = _lasting_health(known) if known else "up"
    health: Health = before if before in ("held", "draining") else "up"
    fresh = node.model_copy(update={"epoch": epoch, "health": health, "last_seen": now})
    return _settle(_with_node(pool, fresh), [])


def set_tags(pool: Pool, node: str, tags: frozenset[str]) -> Outcome:
    """Replace capability tags; a lease that needs a tag the node no longer has is revoked. A held node returns."""
    changed = pool.nodes[node].model_copy(update={"tags": tags})
    if _lasting_health(changed) == "held":
        changed = changed.model_copy(update={"found_again" if changed.health == "lost" else "health": "up"})
    pool = _with_node(pool, changed)
    lease = pool.lease_of(node)
    if lease is None or lease.tag in tags:
        return _settle(pool, [])
    return _settle(*_revoke(pool, lease, f"tag {lease.tag!r} was taken from node {node}"))


def drain(pool: Pool, node: str, *, undo: bool = False) -> Outcome:
    """Grant nothing on ``node`` and end its lease, or take it back into service."""
    health: Health = "up" if undo else "draining"
    pool = _with_node(pool, pool.nodes[node].model_copy(update={"health": health}))
    return _settle(*_revoke_node(pool, node, f"node {node} is drained")) if not undo else _settle(pool, [])


def remove_node(pool: Pool, node: str) -> Outcome:
    """End the node's lease and forget the node once it is free."""
    pool = _with_node(pool, pool.nodes[node].model_copy(update={"health": "leaving"}))
    return _settle(*_revoke_node(pool, node, f"node {node} is removed"))


def preempt(pool: Pool, node: str, reason: str, *, hold: bool = False) -> Outcome:
    """Take the node's lease away by hand; with ``hold`` it stays free until :func:`set_tags` or drain undo."""
    if hold:
        pool = _with_node(pool, pool.nodes[node].model_copy(update={"health": "held"}))
    return _settle(*_revoke_node(pool, node, reason))


def node_seen(pool: Pool, node: str, boot_id: str, now: float) -> Outcome:
    """The node is alive; a lost one is back."""
    known = pool.nodes.get(node)
    if known is None or known.boot_id != boot_id:
        return Outcome(pool, [])
    back = known.health == "lost"
    seen = known.model_copy(update={"last_seen": now, "health": _lasting_health(known)})
    pool = _with_node(pool, seen)
    return _settle(pool, []) if back else Outcome(pool, [])


def node_lost(pool: Pool, node: str, reason: str) -> Outcome:
    """The node is dead: its lease is fenced, not waited for."""
    known = pool.nodes.get(node)
    if known is None or known.health == "lost":
        return Outcome(pool, [])
    health: Health = "leaving" if known.health == "leaving" else "lost"
    lost = known.model_copy(update={"health": health, "found_again": known.health})
    pool = _explain(_with_node(pool, lost), f"node {node} is lost", reason)
    lease = pool.lease_of(node)
    if lease is None:
        return _settle(pool, [])
    pool = _with_lease(pool, lease.model_copy(update={"state": "revoking"}))
    return _settle(pool, [Fence(lease=lease, node=node, reason=reason)])


def tick(pool: Pool, now: float, *, lost_after: float) -> Outcome:
    """Time has passed: nodes not seen for ``lost_after`` seconds are lost.

    If the pool itself was away for that long (the server was down, the
    machine slept), silence proves nothing and every node gets a new period.
    """
    away = bool(pool.last_tick) and now - pool.last_tick > lost_after
    pool = pool.model_copy(update={"last_tick": now})
    if away:
        fresh = {n: node.model_copy(update={"last_seen": now}) for n, node in pool.nodes.items()}
        return Outcome(pool.model_copy(update={"nodes": fresh}), [])
    actions: list[Action] = []
    for node in list(pool.nodes.values()):
        silent = now - node.last_seen
        if node.health != "lost" and silent > lost_after:
            pool, more = node_lost(pool, node.id, f"not seen for {silent:.0f} s (limit {lost_after:.0f} s)")
            actions += more
    return Outcome(pool, actions)


# --- demands and leases ----------------------------------------------------------------------------------------------


def request(pool: Pool, demand: Demand) -> Outcome:
    """A demand arrives; one with a known ``request_id`` changes nothing.

    A standing demand takes the place of the one its run had for the same role:
    a run that was terminated and started again asks anew.
    """
    if demand.request_id in pool.demands or demand.request_id in pool.seen_requests:
        return Outcome(pool, [])
    demand = demand.model_copy(update={"arrived": pool.serial})
    pool = pool.model_copy(
        update={
            "serial": pool.serial + 1,
            "demands": {**pool.demands, demand.request_id: demand},
            "seen_requests": (*pool.seen_requests, demand.request_id)[-KEPT_REQUESTS:],
        }
    )
    actions: list[Action] = []
    for old in _replaced_by(pool, demand):
        pool, more = withdraw(pool, old.request_id, f"run {demand.run} asks anew with {demand.request_id}")
        actions += more
    pool, more = _settle(pool, [])
    return Outcome(pool, actions + more)


def _replaced_by(pool: Pool, demand: Demand) -> list[Demand]:
    same = [d for d in pool.demands.values() if (d.run, d.role, d.count) == (demand.run, demand.role, None)]
    return [d for d in same if demand.count is None and d.request_id != demand.request_id]


def withdraw(pool: Pool, request_id: str, reason: str) -> Outcome:
    """The demand is over; its leases are revoked."""
    demands = {r: d for r, d in pool.demands.items() if r != request_id}
    seen = (*(r for r in pool.seen_requests if r != request_id), request_id)[-KEPT_REQUESTS:]
    pool = pool.model_copy(update={"demands": demands, "seen_requests": seen})
    actions: list[Action] = []
    for lease in pool.leases_for(request_id):
        pool, more = _revoke(pool, lease, reason)
        actions += more
    return _settle(pool, actions)


def released(pool: Pool, lease_id: str, epoch: int) -> Outcome:
    """A lease has ended; a gang's demand ends with it. An unknown lease changes nothing."""
    lease = pool.leases.get(f"{lease_id}/{epoch}")
    if lease is None:
        return Outcome(pool, [])
    leases = {key: other for key, other in pool.leases.items() if key != lease.key}
    demands = dict(pool.demands)
    demand = demands.get(lease.request_id)
    if demand is not None and demand.count is not None:
        del demands[lease.request_id]
    nodes = {n: v for n, v in pool.nodes.items() if not (v.health == "leaving" and n in lease.members)}
    return _settle(pool.model_copy(update={"leases": leases, "demands": demands, "nodes": nodes}), [])


# --- scheduling ------------------------------------------------------------------------------------------------------


def waiting(pool: Pool) -> list[str]:
    """One line for each demand that could use more nodes, saying what it waits for."""
    lines = []
    for demand in _ranked(pool):
        if demand.count is None or pool.leases_for(demand.request_id):
            continue
        fit = [n.id for n in _matching(pool, demand)]
        busy = {n: lease.key for n in fit if (lease := pool.lease_of(n))}
        lines.append(
            f"{demand.request_id}: {demand.count} node(s) with tag {demand.tag!r}; fit: {', '.join(fit) or 'none'}; "
            f"busy: {', '.join(f'{n} ({key})' for n, key in sorted(busy.items())) or 'none'}"
        )
    return lines


def _settle(pool: Pool, actions: list[Action]) -> Outcome:
    """Serve demands in rank order with the nodes as they are now."""
    reserved: set[str] = set()
    for demand in _ranked(pool):
        serve = _serve_standing if demand.count is None else _serve_gang
        pool, more = serve(pool, demand, reserved)
        actions = actions + more
    return Outcome(pool, actions)


def _serve_standing(pool: Pool, demand: Demand, reserved: set[str]) -> Outcome:
    actions: list[Action] = []
    for node in _matching(pool, demand):
        if node.id in reserved:
            continue
        lease = pool.lease_of(node.id)
        if lease is not None and lease.request_id == demand.request_id:
            continue
        pool, more = _take(pool, demand, (node.id,), reserved)
        actions += more
    return Outcome(pool, actions)


def _serve_gang(pool: Pool, demand: Demand, reserved: set[str]) -> Outcome:
    if pool.leases_for(demand.request_id):
        return Outcome(pool, [])
    usable = [n.id for n in _matching(pool, demand) if n.id not in reserved and _can_take(pool, demand, n.id)]
    count = demand.count or 0
    if len(usable) < count:
        if demand.passed >= PATIENCE:  # it has waited long enough: nobody behind it may use what it will need
            reserved.update(usable)
        return Outcome(pool, [])
    return _take(pool, demand, tuple(usable[:count]), reserved)


def _can_take(pool: Pool, demand: Demand, node: str) -> bool:
    lease = pool.lease_of(node)
    return lease is None or lease.state == "revoking" or lease.priority < demand.priority


def _take(pool: Pool, demand: Demand, members: tuple[str, ...], reserved: set[str]) -> Outcome:
    """Grant if all members are free; else revoke what can be revoked and reserve them until they are."""
    if not all(_can_take(pool, demand, node) for node in members):
        return Outcome(pool, [])
    reserved.update(members)
    holders = {lease.key: lease for node in members if (lease := pool.lease_of(node)) is not None}
    if not holders:
        return _grant(pool, demand, members)
    actions: list[Action] = []
    for lease in holders.values():
        reason = f"{demand.role} of run {demand.run} needs {', '.join(members)} (priority {demand.priority})"
        pool, more = _revoke(pool, lease, reason)
        actions += more
    return Outcome(pool, actions)


def _grant(pool: Pool, demand: Demand, members: tuple[str, ...]) -> Outcome:
    epoch = 1 + max(pool.nodes[node].epoch for node in members)
    lease = Lease(
        id=f"{demand.run}-{demand.role}-{members[0]}",
        epoch=epoch,
        request_id=demand.request_id,
        run=demand.run,
        role=demand.role,
        tag=demand.tag,
        members=members,
        owner=demand.owner,
        priority=demand.priority,
    )
    nodes = dict(pool.nodes)
    for node in members:
        nodes[node] = nodes[node].model_copy(update={"epoch": epoch})
    pool = pool.model_copy(update={"nodes": nodes, "demands": _count_passed(pool, demand, members)})
    pool = _explain(
        _with_lease(pool, lease),
        f"granted {lease.key} on {', '.join(members)}",
        f"free and tagged {demand.tag!r}; request {demand.request_id}, priority {demand.priority}, "
        f"passed over {demand.passed} times",
    )
    return Outcome(pool, [Grant(lease=lease)])


def _count_passed(pool: Pool, winner: Demand, members: tuple[str, ...]) -> dict[str, Demand]:
    demands = {}
    for key, demand in pool.demands.items():
        if key == winner.request_id:
            demands[key] = demand.model_copy(update={"passed": 0})
        elif _wants(pool, demand, members):
            demands[key] = demand.model_copy(update={"passed": demand.passed + 1})
        else:
            demands[key] = demand
    return demands


def _wants(pool: Pool, demand: Demand, members: tuple[str, ...]) -> bool:
    if demand.count is not None and pool.leases_for(demand.request_id):
        return False
    return any(_fits(pool.nodes[node], demand) for node in members)


def _ranked(pool: Pool) -> list[Demand]:
    return sorted(pool.demands.values(), key=lambda d: (d.passed < PATIENCE, -d.priority, d.arrived))


def _fits(node: Node, demand: Demand) -> bool:
    allowed = not demand.candidates or node.id in demand.candidates
    return node.health == "up" and demand.tag in node.tags and allowed


def _matching(pool: Pool, demand: Demand) -> list[Node]:
    fit = [node for node in pool.nodes.values() if _fits(node, demand)]
    return sorted(fit, key=lambda node: (-node.train_priority, node.id))


def _revoke_node(pool: Pool, node: str, reason: str) -> Outcome:
    lease = pool.lease_of(node)
    if lease is None:
        leaving = pool.nodes[node].health == "leaving"
        nodes = {n: v for n, v in pool.nodes.items() if not (leaving and n == node)}
        return Outcome(pool.model_copy(update={"nodes": nodes}), [])
    return _revoke(pool, lease, reason)


def _revoke(pool: Pool, lease: Lease, reason: str) -> Outcome:
    if lease.state == "revoking":
        return Outcome(pool, [])
    revoking = lease.model_copy(update={"state": "revoking"})
    pool = _explain(_with_lease(pool, revoking), f"revoked {lease.key}", reason)
    return Outcome(pool, [Revoke(lease=revoking, reason=reason)])


def _lasting_health(node: Node) -> Health:
    return node.found_again if node.health == "lost" else node.health


def _with_node(pool: Pool, node: Node) -> Pool:
    return pool.model_copy(update={"nodes": {**pool.nodes, node.id: node}})


def _with_lease(pool: Pool, lease: Lease) -> Pool:
    return pool.model_copy(update={"leases": {**pool.leases, lease.key: lease}})


def _explain(pool: Pool, what: str, why: str) -> Pool:
    kept: Iterable[Explained] = (*pool.decisions, Explained(what=what, why=why))
    return pool.model_copy(update={"decisions": tuple(kept)[-KEPT_DECISIONS:]})
