"""``ResourcePool``: one workflow a cluster; grants leases on nodes by tag, takes them back, notices lost nodes.

All decisions are :mod:`workflows.scheduling.pool`. Handlers apply one
transition and put its actions into the outbox; the main loop carries them
out. The outbox is part of the state, so a new generation loses nothing. The
pool runs no activities.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pydantic import ConfigDict, Field
from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

from workflows import calls
from workflows.markdown import link, page, table
from workflows.messages import (
    Decision,
    DrainNode,
    LeaseEvent,
    LeaseInput,
    LeaseRequest,
    LeaseStatus,
    MemberLost,
    Message,
    NodeInfo,
    NodeName,
    NodeSeen,
    NodeStatus,
    PoolStatus,
    PreemptNode,
    ReleaseLease,
    Revoke,
    SetTags,
    WithdrawRequest,
)
from workflows.scheduling import pool as pools
from workflows.scheduling.pool import Action, Fence, Grant, Outcome, Pool
from workflows.spec import RunSpec

TICK = timedelta(seconds=15)
LOST_AFTER_S = 45.0


class PoolState(Message):
    """What the pool carries through continue-as-new."""

    model_config = ConfigDict(extra="forbid", frozen=False)

    pool: Pool = Field(default_factory=Pool)
    specs: dict[str, RunSpec] = Field(default_factory=dict)
    """Run files of the runs that have requests or leases."""
    outbox: list[Grant | pools.Revoke | Fence] = Field(default_factory=list)


@workflow.defn(name="ResourcePool", failure_exception_types=[ApplicationError])
class ResourcePool:
    """See the module. Id ``pool/<cluster>``; node agents start it with their first ``add_node``."""

    @workflow.init
    def __init__(self, state: PoolState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: PoolState) -> None:
        while not calls.must_continue_as_new() or self.state.outbox:
            try:
                await workflow.wait_condition(lambda: bool(self.state.outbox), timeout=TICK)
            except TimeoutError:
                self._apply(pools.tick(self.state.pool, self._now(), lost_after=LOST_AFTER_S))
            while self.state.outbox:
                await self._perform(self.state.outbox[0])
                self.state.outbox.pop(0)
            self._show()
        workflow.continue_as_new(self.state)

    # Nodes

    @workflow.update(description='A node agent registers: {"id": "n1", "tags": ["rollout"], "boot_id": "b7"}')
    def add_node(self, info: NodeInfo) -> NodeStatus:
        node = pools.Node(
            id=info.id,
            tags=frozenset(info.tags),
            train_priority=info.train_priority,
            boot_id=info.boot_id,
            epoch=info.epoch,
        )
        self._apply(pools.add_node(self.state.pool, node, self._now()))
        return self._node_status(info.id)

    @workflow.update(description='Replace a node\'s capability tags: {"node": "n1", "tags": ["rollout", "train"]}')
    def set_tags(self, order: SetTags) -> NodeStatus:
        self._apply(pools.set_tags(self.state.pool, order.node, frozenset(order.tags)))
        return self._node_status(order.node)

    @set_tags.validator
    def _check_set_tags(self, order: SetTags) -> None:
        self._must_know(order.node)
        if not order.tags:
            raise ApplicationError(f"tags of node {order.node} are empty: to take it out of service use drain")

    @workflow.update(
        description='End a node\'s lease and grant nothing on it: {"node": "n1"}; {"undo": true} reverses it'
    )
    def drain(self, order: DrainNode) -> NodeStatus:
        self._apply(pools.drain(self.state.pool, order.node, undo=order.undo))
        return self._node_status(order.node)

    @drain.validator
    def _check_drain(self, order: DrainNode) -> None:
        self._must_know(order.node)

    @workflow.update(description='End a node\'s lease and forget the node: {"node": "n1"}')
    def remove_node(self, order: NodeName) -> str:
        self._apply(pools.remove_node(self.state.pool, order.node))
        return "removed" if order.node not in self.state.pool.nodes else "leaving: its lease is being revoked"

    @remove_node.validator
    def _check_remove(self, order: NodeName) -> None:
        self._must_know(order.node)

    @workflow.update(
        description='Take a node\'s lease away: {"node": "n1", "reason": "I need it", "hold": true}; '
        "without hold it is granted anew to whoever waits"
    )
    def preempt(self, order: PreemptNode) -> str:
        lease = self.state.pool.lease_of(order.node)
        self._apply(pools.preempt(self.state.pool, order.node, order.reason, hold=order.hold))
        return f"revoked {lease.key}" if lease else "the node was free"

    @preempt.validator
    def _check_preempt(self, order: PreemptNode) -> None:
        self._must_know(order.node)

    @workflow.signal(description="Sent by node agents every few seconds.")
    def node_seen(self, seen: NodeSeen) -> None:
        self._apply(pools.node_seen(self.state.pool, seen.node, seen.boot_id, self._now()))

    @workflow.signal(description='A node is known to be dead: {"node": "n1", "boot_id": "b7"}')
    def node_lost(self, seen: NodeSeen) -> None:
        known = self.state.pool.nodes.get(seen.node)
        if known is not None and known.boot_id == seen.boot_id:
            self._apply(pools.node_lost(self.state.pool, seen.node, "reported dead"))

    # Leases

    @workflow.signal(description="A workflow asks for nodes in a role.")
    def request(self, request: LeaseRequest) -> None:
        self.state.specs[request.run] = request.spec
        demand = pools.Demand(
            request_id=request.request_id,
            run=request.run,
            role=request.role,
            tag=request.tag,
            candidates=frozenset(request.candidates),
            count=request.count,
            priority=request.priority,
            owner=request.owner,
        )
        self._apply(pools.request(self.state.pool, demand))

    @workflow.signal(description="The request is over: its leases are revoked.")
    def withdraw(self, order: WithdrawRequest) -> None:
        self._apply(pools.withdraw(self.state.pool, order.request_id, order.reason))

    @workflow.signal(description="Sent by a lease when it has ended.")
    def release(self, release: ReleaseLease) -> None:
        self._apply(pools.released(self.state.pool, release.lease, release.epoch))
        self._forget_specs()

    @workflow.query(description="Nodes, leases, who waits for what, and the last decisions with their reasons.")
    def status(self) -> PoolStatus:
        pool = self.state.pool
        return PoolStatus(
            cluster=pool.cluster,
            nodes=tuple(self._node_status(node) for node in sorted(pool.nodes)),
            waiting=tuple(pools.waiting(pool)),
            decisions=tuple(Decision(what=d.what, why=d.why) for d in pool.decisions),
            leases=tuple(
                LeaseStatus.model_validate(
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
                for lease in pool.leases.values()
            ),
        )

    # Mechanics

    def _apply(self, outcome: Outcome) -> None:
        self.state.pool = outcome.pool
        self.state.outbox.extend(outcome.actions)

    async def _perform(self, action: Action) -> None:
        lease = action.lease
        if isinstance(action, Grant):
            await self._start(action)
        elif isinstance(action, Fence):
            loss = MemberLost(node=action.node, reason=action.reason)
            await self._tell_lease(lease, "member_lost", loss)
        else:
            await self._tell_lease(lease, "revoke", Revoke(reason=action.reason))

    async def _start(self, grant: Grant) -> None:
        lease = grant.lease
        spec = self.state.specs[lease.run]
        task = LeaseInput.model_validate(
            {
                "lease": lease.id,
                "epoch": lease.epoch,
                "run": lease.run,
                "role": lease.role,
                "members": lease.members,
                "owner": lease.owner,
                "pool": workflow.info().workflow_id,
                "spec": spec,
            }
        )
        try:
            await workflow.start_child_workflow(
                "Lease",
                task,
                id=calls.lease_id(lease.id, lease.epoch),
                task_queue=workflow.info().task_queue,
                parent_close_policy=ParentClosePolicy.ABANDON,
                static_summary=f"{lease.role} of {lease.run} on {', '.join(lease.members)}",
            )
        except WorkflowAlreadyStartedError:  # epochs of a lost pool: the next one is higher
            self._apply(pools.released(self.state.pool, lease.id, lease.epoch))
            return
        event = LeaseEvent.model_validate(
            {**task.model_dump(exclude={"owner", "pool", "spec", "run"}), "state": "granted"}
        )
        if not await calls.tell_owner(lease.owner, event):  # nobody is there to use it
            self._apply(pools.withdraw(self.state.pool, lease.request_id, "the owner has ended"))

    async def _tell_lease(self, lease: pools.Lease, signal: str, arg: Message) -> None:
        if not await calls.tell(calls.lease_id(lease.id, lease.epoch), signal, arg):
            self._apply(pools.released(self.state.pool, lease.id, lease.epoch))

    def _forget_specs(self) -> None:
        pool = self.state.pool
        runs = {d.run for d in pool.demands.values()} | {lease.run for lease in pool.leases.values()}
        self.state.specs = {run: spec for run, spec in self.state.specs.items() if run in runs}

    def _must_know(self, node: str) -> None:
        if node not in self.state.pool.nodes:
            known: Sequence[str] = sorted(self.state.pool.nodes)
            raise ApplicationError(f"node {node!r} is not in the pool; known nodes: {', '.join(known) or 'none'}")

    def _now(self) -> float:
        return workflow.now().timestamp()

    def _node_status(self, node: str) -> NodeStatus:
        value = self.state.pool.nodes[node]
        lease = self.state.pool.lease_of(node)
        return NodeStatus(
            node=node,
            tags=tuple(sorted(value.tags)),
            health=value.health,
            activity="free" if lease is None else {"engine": "rollout", "trainer": "train"}[lease.role],
            epoch=value.epoch,
            lease=lease.key if lease else None,
        )

    def _show(self) -> None:
        status = self.status()
        rows = [(n.node, ", ".join(n.tags), n.activity, n.health, self._lease_link(n)) for n in status.nodes]
        last = [f"* {d.what}: {d.why}" for d in status.decisions[-5:]]
        waiting = [f"* waits: {one}" for one in status.waiting]
        nodes = table(("node", "can", "does", "health", "lease"), rows)
        workflow.set_current_details(page([*nodes, *waiting, "", "Last decisions:", "", *last]))

    def _lease_link(self, node: NodeStatus) -> str:
        return link(node.lease, workflow.info().namespace, f"lease/{node.lease}") if node.lease else ""
