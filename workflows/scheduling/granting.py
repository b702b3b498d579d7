"""Who gets which nodes: one round over all demands, after every change of the pool.

Runs are served by priority, then in order of arrival; the demands of one run by their own priority. A round has two
passes: first what runs may claim within their quotas, then what nobody claimed is lent to those beyond theirs.

A demand takes a node that is
    * free, or about to be;
    * held by its own run for something less urgent;
    * held by another run that is over its quota, or that comes behind: its lease is revoked, and the node is granted
      once it has ended.

A demand that was passed over :data:`PATIENCE` times by later ones goes first, and no other run takes away what it gets.
"""

from __future__ import annotations

from workflows.scheduling.decision import Decision
from workflows.scheduling.pool_state import (
    Action,
    Demand,
    Grant,
    Lease,
    Node,
    Outcome,
    Pool,
    Revoke,
    explained,
    with_lease,
)

PATIENCE = 8
"""Grants to later ones that a demand tolerates before it goes first."""


def settle(pool: Pool, actions: list[Action]) -> Outcome:
    """Serve all demands with the nodes as they are now; new actions follow ``actions``.

    Rounds follow each other until one changes nothing: what is lent in one may put a run over its quota, and so be
    claimed in the next.
    """
    actions = list(actions)
    while True:
        turn = _Round(pool)
        for lending in (False, True):
            for demand in ranked(turn.pool):
                turn.serve(demand, lending=lending)
        pool = turn.pool
        actions += turn.actions
        if not turn.actions:
            return Outcome(pool, actions)


def revoke(pool: Pool, lease: Lease, reason: str, *, promised: str = "") -> Outcome:
    """Ask a lease back, for the request that is ``promised`` its members; one asked back already is left alone."""
    if lease.state == "revoking":
        return Outcome(pool, [])
    revoking = lease.model_copy(update={"state": "revoking", "promised": promised})
    decision = Decision(what=f"revoked {lease.key}", why=reason)
    return Outcome(
        explained(with_lease(pool, revoking), decision, lease.members), [Revoke(lease=revoking, reason=reason)]
    )


def ranked(pool: Pool) -> list[Demand]:
    """Demands in the order in which they are served."""
    return sorted(
        pool.demands.values(), key=lambda d: (d.passed < PATIENCE, *place(pool, d.run), -d.priority, d.arrived)
    )


def place(pool: Pool, run: str) -> tuple[int, int]:
    """Where a run stands in the queue: the smaller, the sooner."""
    share = pool.share(run)
    return -share.priority, share.arrived


def matching(pool: Pool, demand: Demand) -> list[Node]:
    """Nodes that could serve the demand, the best first: those good at training for ``train``, the others else."""
    sign = -1 if demand.tag in ("train", "critic") else 1
    fit = [node for node in pool.nodes.values() if _fits(node, demand)]
    return sorted(fit, key=lambda node: (sign * node.order, node.id))


def over_quota(pool: Pool, run: str) -> int:
    """How many nodes the run holds beyond its quota."""
    quota = pool.share(run).quota
    return 0 if quota is None else max(0, len(pool.held_by(run)) - quota)


class _Round:
    """One round; ``reserved`` maps nodes that are spoken for in it to the run that gets them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.actions: list[Action] = []
        self.promised = {
            node: lease.promised
            for lease in pool.leases.values()
            for node in lease.members
            if lease.state == "revoking" and _still_wants(pool, lease.promised, node)
        }
        self.reserved = {node: pool.demands[request].run for node, request in self.promised.items()}
        self.holder = {node: lease.key for lease in pool.leases.values() for node in lease.members}

    def serve(self, demand: Demand, *, lending: bool) -> None:
        if demand.count is not None:
            self._serve_gang(demand, lending)
            return
        nodes = [node.id for node in matching(self.pool, demand)]
        for node in sorted(nodes, key=lambda node: self._others(demand, node)):
            lease = self._lease(node)
            mine = lease is not None and lease.request_id == demand.request_id
            if not mine and self._can_take(demand, node, lending) and (lending or self._within(demand, (node,))):
                self._take(demand, (node,))

    def _serve_gang(self, demand: Demand, lending: bool) -> None:
        if self.pool.leases_for(demand.request_id):
            return
        count = demand.count or 0
        fit = [node.id for node in matching(self.pool, demand)]
        usable = [node for node in fit if self._can_take(demand, node, lending)]
        usable.sort(key=lambda node: self.promised.get(node) != demand.request_id)
        own = self._nodes_of(demand.run)
        for members in (usable[:count], sorted(usable, key=lambda node: node not in own)[:count]):
            if len(members) == count and (lending or self._within(demand, tuple(members))):
                self._take(demand, tuple(members))
                return
        # It has waited long enough: nobody behind it may use what it will need.
        if demand.passed >= PATIENCE and len(fit) >= count and not lending:
            self.reserved.update(dict.fromkeys(usable, demand.run))

    def _can_take(self, demand: Demand, node: str, lending: bool) -> bool:
        if node in self.reserved:
            return self.promised.get(node) == demand.request_id
        lease = self._lease(node)
        if lease is None or lease.state == "revoking":
            return True
        if lease.run == demand.run:
            return lease.priority < demand.priority
        if lending:
            return False
        ahead = place(self.pool, demand.run) < place(self.pool, lease.run) and not lease.protected
        return ahead or over_quota(self.pool, lease.run) > 0

    def _within(self, demand: Demand, members: tuple[str, ...]) -> bool:
        """Whether the demand's run stays within its quota with these nodes."""
        quota = self.pool.share(demand.run).quota
        return quota is None or len(self._nodes_of(demand.run) | set(members)) <= quota

    def _nodes_of(self, run: str) -> set[str]:
        promised = {node for node, winner in self.reserved.items() if winner == run}
        return promised | {node for node in self.pool.held_by(run) if node not in self.reserved}

    def _others(self, demand: Demand, node: str) -> bool:
        """Whether another run would lose the node: such nodes are taken last."""
        lease = self._lease(node)
        return lease is not None and lease.run != demand.run and lease.state == "held"

    def _take(self, demand: Demand, members: tuple[str, ...]) -> None:
        """Grant if all members are free; else ask back what is held, and reserve them until they are."""
        self.reserved.update(dict.fromkeys(members, demand.run))
        self.promised = {node: request for node, request in self.promised.items() if node not in members}
        holders = {lease.key: lease for node in members if (lease := self._lease(node)) is not None}
        if not holders:
            self._grant(demand, members)
        for lease in holders.values():
            where = f"needs {', '.join(members)}"
            if lease.run != demand.run:
                where += ", and is " + (
                    "ahead of" if over_quota(self.pool, lease.run) == 0 else "within its quota, unlike"
                )
                where += f" run {lease.run}"
            reason = f"{demand.role} of run {demand.run} {where}"
            self.pool, more = revoke(self.pool, lease, reason, promised=demand.request_id)
            self.actions += more

    def _grant(self, demand: Demand, members: tuple[str, ...]) -> None:
        pool = self.pool
        epoch = 1 + max(pool.nodes[node].epoch for node in members)
        passed = pool.demands[demand.request_id].passed
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
            protected=passed >= PATIENCE,
        )
        fenced = {node: pool.nodes[node].model_copy(update={"epoch": epoch}) for node in members}
        demands = {key: _after_grant(pool, other, demand, members) for key, other in pool.demands.items()}
        pool = pool.model_copy(update={"nodes": {**pool.nodes, **fenced}, "demands": demands})
        self.pool = explained(with_lease(pool, lease), _why(pool, demand, lease, passed), members)
        self.holder.update(dict.fromkeys(members, lease.key))
        self.actions.append(Grant(lease=lease))

    def _lease(self, node: str) -> Lease | None:
        key = self.holder.get(node)
        return self.pool.leases[key] if key else None


def _why(pool: Pool, demand: Demand, lease: Lease, passed: int) -> Decision:
    share = pool.share(demand.run)
    facts = {
        "run_priority": float(share.priority),
        "role_priority": float(demand.priority),
        "passed_over": float(passed),
    }
    if share.quota is not None:
        facts |= {"quota": float(share.quota), "holds": float(len(pool.held_by(demand.run)))}
    why = f"it is tagged {demand.tag!r}, was free, and {demand.role} of run {demand.run} is first in the queue for it"
    return Decision(what=f"granted {lease.key} on {', '.join(lease.members)}", why=why, facts=facts)


def _after_grant(pool: Pool, demand: Demand, winner: Demand, members: tuple[str, ...]) -> Demand:
    """Count that a demand was passed over by one that came later."""
    if demand.request_id == winner.request_id:
        return demand.model_copy(update={"passed": 0})
    later = _arrival(pool, winner) > _arrival(pool, demand)
    if later and _wants(pool, demand, members):
        return demand.model_copy(update={"passed": demand.passed + 1})
    return demand


def _arrival(pool: Pool, demand: Demand) -> tuple[int, int]:
    return pool.share(demand.run).arrived, demand.arrived


def _still_wants(pool: Pool, request_id: str, node: str) -> bool:
    demand = pool.demands.get(request_id)
    return demand is not None and _wants(pool, demand, (node,))


def _wants(pool: Pool, demand: Demand, members: tuple[str, ...]) -> bool:
    if demand.count is not None and pool.leases_for(demand.request_id):
        return False
    return any(_fits(pool.nodes[node], demand) for node in members)


def _fits(node: Node, demand: Demand) -> bool:
    allowed = not demand.candidates or node.id in demand.candidates
    return node.health == "up" and demand.tag in node.tags and allowed
