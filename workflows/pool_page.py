"""A pool as its status query and as a page of Markdown for the Temporal UI. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workflows.explain import why_node
from workflows.markdown import link, page, table
from workflows.messages import LeaseStatus, NodeRate, NodeStatus, PoolStatus, RequestStatus, ShareStatus
from workflows.scheduling.granting import ranked
from workflows.scheduling.pool import Lease, Pool
from workflows.scheduling.queueing import waiting

SHOWN_DECISIONS = 5


def pool_status(pool: Pool, rates: Mapping[str, Mapping[str, NodeRate]] | None = None) -> PoolStatus:
    """Everything that the query answers. ``rates``: by node and role."""
    rates = rates or {}
    waits = waiting(pool)
    return PoolStatus(
        cluster=pool.cluster,
        nodes=tuple(node_status(pool, node, tuple(rates.get(node, {}).values())) for node in sorted(pool.nodes)),
        requests=tuple(
            RequestStatus(
                request_id=demand.request_id,
                run=demand.run,
                role=demand.role,
                owner=demand.owner,
                waiting_for=waits.get(demand.request_id, ""),
            )
            for demand in ranked(pool)
        ),
        shares=tuple(
            ShareStatus(run=run, priority=share.priority, quota=share.quota, holds=len(pool.held_by(run)))
            for run, share in pool.shares.items()
        ),
        decisions=pool.decisions,
        leases=tuple(_lease_status(lease) for lease in pool.leases.values()),
    )


def node_status(pool: Pool, node: str, rates: tuple[NodeRate, ...] = ()) -> NodeStatus:
    """One node. Raises :class:`KeyError` if the pool does not know it."""
    value, lease = pool.nodes[node], pool.lease_of(node)
    return NodeStatus(
        node=node,
        tags=tuple(sorted(value.tags)),
        health=value.health,
        activity=pool.activity(node),
        epoch=value.epoch,
        lease=lease.key if lease else None,
        shares=tuple(sorted(value.shares)),
        train_priority=value.order,
        why=value.why,
        since=value.since,
        rates=rates,
    )


def pool_page(status: PoolStatus, namespace: str) -> str:
    """The page: what each node does and why, who waits for what, the last decisions."""

    def lease_link(node: NodeStatus) -> str:
        return link(node.lease, namespace, f"lease/{node.lease}") if node.lease else ""

    rows = [(n.node, ", ".join(n.tags), n.does, n.health, lease_link(n)) for n in status.nodes]
    why = [f"* {why_node(status, node)}" for node in status.nodes]
    waits = [f"* {r.role} of run {r.run} waits for {r.waiting_for}" for r in status.requests if r.waiting_for]
    last = [f"* {decision.line()}" for decision in status.decisions[-SHOWN_DECISIONS:]]
    nodes = table(("node", "can", "does", "health", "lease"), rows)
    return page([*nodes, *why, *waits, "", "Last decisions:", "", *last])


def _lease_status(lease: Lease) -> LeaseStatus:
    return LeaseStatus.model_validate(
        {
            "lease": lease.id,
            "epoch": lease.epoch,
            "run": lease.run,
            "role": lease.role,
            "members": lease.members,
            "owner": lease.owner,
            "state": lease.state,
        }
    )
