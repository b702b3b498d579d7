"""Who waits for what, in words: for the status query, the runs that wait, and ``seamlessflow why``."""

from __future__ import annotations

from workflows.scheduling.granting import matching, place, ranked
from workflows.scheduling.pool_state import Demand, Lease, Node, Pool


def waiting(pool: Pool) -> dict[str, str]:
    """By request id: what each demand without any lease waits for, in the order in which they are served.

    *Example*: ``2 nodes tagged 'train': a is held by run r (trainer), which is ahead``.
    """
    unserved = [demand for demand in ranked(pool) if not pool.leases_for(demand.request_id)]
    return {demand.request_id: wait_of(pool, demand) for demand in unserved}


def blocked(pool: Pool) -> dict[str, str]:
    """The same, without those that wait for nothing but their own run to change over."""
    return {request: text for request, text in waiting(pool).items() if not _own_affair(pool, pool.demands[request])}


def _own_affair(pool: Pool, demand: Demand) -> bool:
    fit = [node.id for node in matching(pool, demand)]
    leases = {lease.key: lease for node in fit if (lease := pool.lease_of(node))}
    return len(fit) >= (demand.count or 1) and all(lease.run == demand.run for lease in leases.values())


def wait_of(pool: Pool, demand: Demand) -> str:
    """What one unserved demand waits for."""
    wanted = "a node" if demand.count in (None, 1) else f"{demand.count} nodes"
    fit = [node.id for node in matching(pool, demand)]
    missing = (demand.count or 1) - len(fit)
    clauses = [_missing(pool, demand, missing, bool(fit))] if missing > 0 else []
    clauses += [_holder(pool, demand, lease, nodes) for lease, nodes in _holders(pool, fit)]
    share = pool.share(demand.run)
    if share.quota is not None and len(pool.held_by(demand.run)) + (demand.count or 1) > share.quota:
        clauses.append(f"the run's quota is {share.quota} nodes, beyond which it gets what no other run wants")
    return f"{wanted} tagged {demand.tag!r}: {'; '.join(clauses) or 'it is being granted'}"


def _missing(pool: Pool, demand: Demand, count: int, some: bool) -> str:
    named = {n: pool.nodes.get(n) for n in sorted(demand.candidates or pool.nodes)}
    excused = [why for n, node in named.items() if (why := _unfit(n, node, demand.tag))]
    lack = f"{count} more must come" if some else "none is there"
    return f"{lack} ({', '.join(excused)})" if excused else lack


def _unfit(name: str, node: Node | None, tag: str) -> str:
    if node is None:
        return f"{name} is not in the pool"
    if node.health != "up":
        return f"{name} is {node.health}"
    return "" if tag in node.tags else f"{name} cannot {tag}"


def _holders(pool: Pool, nodes: list[str]) -> list[tuple[Lease, list[str]]]:
    leases = {lease.key: lease for node in nodes if (lease := pool.lease_of(node))}
    return [(lease, [n for n in nodes if n in lease.members]) for lease in leases.values()]


def _holder(pool: Pool, demand: Demand, lease: Lease, nodes: list[str]) -> str:
    names = ", ".join(nodes)
    verb = "is" if len(nodes) == 1 else "are"
    if lease.state == "revoking":
        return f"{names} {verb} being given back by {lease.role} of run {lease.run}"
    if lease.run == demand.run:
        return f"{names} {verb} held by the run's own {lease.role}"
    ahead = ", which is ahead" if place(pool, lease.run) < place(pool, demand.run) else ""
    return f"{names} {verb} held by run {lease.run} ({lease.role}{ahead})"
