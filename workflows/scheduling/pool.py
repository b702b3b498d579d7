"""The resource pool as a value: transitions that take a pool and return the next one and the actions it owes.

Nothing here waits, reads a clock or knows Temporal; the ``ResourcePool`` workflow and the simulator drive the same
code, the workflow by events (:mod:`workflows.scheduling.pool_events`).

Rules
    * a node is in at most one lease; a lease's epoch is above every earlier epoch of its members;
    * a gang is granted as a whole or not at all;
    * who gets what: :mod:`workflows.scheduling.granting`.
"""

from __future__ import annotations

from workflows.scheduling.decision import Decision
from workflows.scheduling.granting import PATIENCE, revoke, settle
from workflows.scheduling.pool_state import (
    Action,
    Demand,
    Fence,
    Grant,
    Health,
    Lease,
    Node,
    Outcome,
    Pool,
    Revoke,
    Share,
    explained,
    with_lease,
    with_node,
)

__all__ = [
    "PATIENCE",
    "Action",
    "Demand",
    "Fence",
    "Grant",
    "Lease",
    "Node",
    "Outcome",
    "Pool",
    "Revoke",
    "Share",
    "add_node",
    "drain",
    "node_lost",
    "node_seen",
    "preempt",
    "profiled",
    "released",
    "remove_node",
    "request",
    "set_share",
    "set_tags",
    "tick",
    "withdraw",
]

KEPT_REQUESTS = 200


# --- nodes -----------------------------------------------------------------------------------------------------------


def add_node(pool: Pool, node: Node, now: float) -> Outcome:
    """A node registers, or registers again after its agent restarted: it keeps its lease and its epoch grows only.

    If its machine was restarted meanwhile, nothing of the lease is left on it, and the lease is fenced.
    """
    known = pool.nodes.get(node.id)
    node = node.model_copy(update={"registered": node.tags})
    if known is None:
        fresh = node.model_copy(update={"last_seen": now, "why": "it joined, and nobody wants it yet", "since": now})
        return settle(with_node(pool, fresh), [])
    before = _lasting_health(known)
    health: Health = before if before in ("held", "draining") else "up"
    pool = with_node(
        pool,
        known.model_copy(
            update={
                "tags": known.tags if node.tags == known.registered else node.tags,
                "registered": node.tags,
                "train_priority": node.train_priority,
                "boot_id": node.boot_id,
                "epoch": max(node.epoch, known.epoch),
                "health": health,
                "last_seen": now,
            }
        ),
    )
    if known.boot_id != node.boot_id:
        return settle(*_fence(pool, node.id, "its machine was restarted"))
    return settle(*_keeping_to_tags(pool, node.id))


def set_tags(pool: Pool, node: str, tags: frozenset[str]) -> Outcome:
    """Replace capability tags; a lease that needs a tag the node no longer has is revoked. A held node returns."""
    changed = pool.nodes[node].model_copy(update={"tags": tags})
    pool = explained(
        with_node(pool, changed), Decision(what=f"node {node} can {_words(tags)}", why="its tags were set")
    )
    if _lasting_health(changed) == "held":
        pool = _in_health(pool, node, "up", "its tags were set")
    return settle(*_keeping_to_tags(pool, node))


def profiled(pool: Pool, node: str, priority: float) -> Outcome:
    """The node was measured: its place in the order of training follows from it, unless it was given."""
    known = pool.nodes.get(node)
    if known is None:
        return Outcome(pool, [])
    return settle(with_node(pool, known.model_copy(update={"measured_priority": priority})), [])


def drain(pool: Pool, node: str, reason: str = "drained by hand", *, undo: bool = False) -> Outcome:
    """Grant nothing on ``node`` and end its lease, or take it back into service."""
    if undo:
        return settle(_in_health(pool, node, "up", reason), [])
    return settle(*_revoke_node(_in_health(pool, node, "draining", reason), node, f"node {node} is drained: {reason}"))


def remove_node(pool: Pool, node: str, reason: str = "removed by hand") -> Outcome:
    """End the node's lease and forget the node once it is free."""
    changed = with_node(pool, pool.nodes[node].model_copy(update={"health": "leaving"}))
    pool = explained(changed, Decision(what=f"node {node} leaves", why=reason), (node,))
    return settle(*_revoke_node(pool, node, f"node {node} is removed: {reason}"))


def preempt(pool: Pool, node: str, reason: str, *, hold: bool = False) -> Outcome:
    """Take the node's lease away by hand; with ``hold`` it stays free until :func:`set_tags` or drain undo."""
    if hold:
        pool = _in_health(pool, node, "held", reason)
    return settle(*_revoke_node(pool, node, reason))


def node_seen(pool: Pool, node: str, boot_id: str, now: float, shares: frozenset[str] = frozenset()) -> Outcome:
    """The node is alive, and says which shared work it does; a lost one is back."""
    known = pool.nodes.get(node)
    if known is None or known.boot_id != boot_id:
        return Outcome(pool, [])
    alive = {"last_seen": now, "health": _lasting_health(known), "shares": shares}
    pool = with_node(pool, known.model_copy(update=alive))
    if known.health != "lost":
        return Outcome(pool, [])
    back = Decision(what=f"node {node} is back", why="its agent was heard of again")
    return settle(explained(pool, back, (node,)), [])


def node_lost(pool: Pool, node: str, reason: str) -> Outcome:
    """The node is dead: its lease is fenced, not waited for."""
    known = pool.nodes.get(node)
    if known is None or known.health == "lost":
        return Outcome(pool, [])
    health: Health = "leaving" if known.health == "leaving" else "lost"
    lost = known.model_copy(update={"health": health, "found_again": known.health, "shares": frozenset()})
    pool = explained(with_node(pool, lost), Decision(what=f"node {node} is lost", why=reason), (node,))
    return settle(*_fence(pool, node, reason))


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


def request(pool: Pool, demand: Demand, share: Share | None = None) -> Outcome:
    """A demand arrives, with what its run may have; one with a known ``request_id`` changes nothing.

    It takes the place of the one its run had for the same role: a run that was terminated and started again asks anew,
    and a gang that is asked for again was lost to its owner.
    """
    if demand.request_id in pool.demands or demand.request_id in pool.seen_requests:
        return Outcome(pool, [])
    demand = demand.model_copy(update={"arrived": pool.serial})
    pool = _welcomed(pool, demand.run, share)
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
    pool, more = settle(pool, [])
    return Outcome(pool, actions + more)


def _replaced_by(pool: Pool, demand: Demand) -> list[Demand]:
    same = [d for d in pool.demands.values() if (d.run, d.role) == (demand.run, demand.role)]
    return [d for d in same if (d.count is None) == (demand.count is None) and d.request_id != demand.request_id]


def withdraw(pool: Pool, request_id: str, reason: str) -> Outcome:
    """The demand is over; its leases are revoked."""
    demands = {r: d for r, d in pool.demands.items() if r != request_id}
    seen = (*(r for r in pool.seen_requests if r != request_id), request_id)[-KEPT_REQUESTS:]
    pool = pool.model_copy(update={"demands": demands, "seen_requests": seen})
    actions: list[Action] = []
    for lease in pool.leases_for(request_id):
        pool, more = revoke(pool, lease, reason)
        actions += more
    return settle(_forgotten(pool), actions)


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
    for node in lease.members:
        if node in nodes and nodes[node].health == "up":
            nodes[node] = nodes[node].model_copy(update={"why": f"{lease.key} has ended", "since": pool.now})
    return settle(_forgotten(pool.model_copy(update={"leases": leases, "demands": demands, "nodes": nodes})), [])


def set_share(pool: Pool, run: str, *, priority: int, quota: int | None) -> Outcome:
    """Set what a run may have, by hand: from now on its requests do not change it."""
    share = pool.share(run).model_copy(update={"priority": priority, "quota": quota, "by_hand": True})
    decision = Decision(
        what=f"run {run} has priority {priority} and {'no quota' if quota is None else f'a quota of {quota} nodes'}",
        why="set by hand",
    )
    return settle(explained(pool.model_copy(update={"shares": {**pool.shares, run: share}}), decision), [])


def _welcomed(pool: Pool, run: str, share: Share | None) -> Pool:
    """The run has a place in the queue: that of its first request since it last had none."""
    known = pool.shares.get(run)
    present = any(d.run == run for d in pool.demands.values()) or any(x.run == run for x in pool.leases.values())
    wanted = known if share is None or (known and known.by_hand) else share
    arrived = known.arrived if known and present else pool.serial
    fresh = (wanted or Share()).model_copy(update={"arrived": arrived})
    return pool.model_copy(update={"shares": {**pool.shares, run: fresh}})


def _forgotten(pool: Pool) -> Pool:
    """Shares of runs that are gone, unless a person set them."""
    runs = {d.run for d in pool.demands.values()} | {lease.run for lease in pool.leases.values()}
    kept = {run: share for run, share in pool.shares.items() if run in runs or share.by_hand}
    return pool if len(kept) == len(pool.shares) else pool.model_copy(update={"shares": kept})


def _in_health(pool: Pool, node: str, health: Health, why: str) -> Pool:
    """A lost node stays lost: it comes back with this health."""
    known = pool.nodes[node]
    changed = known.model_copy(update={"found_again" if known.health == "lost" else "health": health})
    words = {"up": "in service", "draining": "drained", "held": "held back"}[health]
    return explained(with_node(pool, changed), Decision(what=f"node {node} is {words}", why=why), (node,))


def _keeping_to_tags(pool: Pool, node: str) -> Outcome:
    lease = pool.lease_of(node)
    if lease is None or lease.tag in pool.nodes[node].tags:
        return Outcome(pool, [])
    return revoke(pool, lease, f"tag {lease.tag!r} was taken from node {node}")


def _fence(pool: Pool, node: str, reason: str) -> Outcome:
    lease = pool.lease_of(node)
    if lease is None:
        return Outcome(pool, [])
    pool = with_lease(pool, lease.model_copy(update={"state": "revoking"}))
    return Outcome(pool, [Fence(lease=lease, node=node, reason=reason)])


def _revoke_node(pool: Pool, node: str, reason: str) -> Outcome:
    lease = pool.lease_of(node)
    if lease is None:
        leaving = pool.nodes[node].health == "leaving"
        nodes = {n: v for n, v in pool.nodes.items() if not (leaving and n == node)}
        return Outcome(pool.model_copy(update={"nodes": nodes}), [])
    return revoke(pool, lease, reason)


def _lasting_health(node: Node) -> Health:
    return node.found_again if node.health == "lost" else node.health


def _words(tags: frozenset[str]) -> str:
    return " and ".join(sorted(tags)) or "do nothing"
