"""``ResourcePool``: one workflow a cluster; grants leases on nodes by tag, takes them back, notices lost nodes.

All decisions are :mod:`workflows.scheduling.pool`. Handlers apply one
transition and put its actions into the outbox; the main loop carries them
out. The outbox is part of the state, so a new generation loses nothing. The
pool runs no activities.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pydantic import ConfigDict, Field
from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

from workflows import calls
from workflows.messages import (
    AuditEntry,
    DrainNode,
    LeaseEvent,
    LeaseInput,
    LeaseRequest,
    MemberLost,
    Message,
    NodeCommand,
    NodeInfo,
    NodeName,
    NodeProfiled,
    NodeRate,
    NodeSeen,
    NodeStatus,
    PoolStatus,
    PreemptNode,
    QueueNotice,
    ReleaseLease,
    Revoke,
    SetShare,
    SetTags,
    WithdrawRequest,
)
from workflows.pool_page import node_status, pool_page, pool_status
from workflows.scheduling import pool as pools
from workflows.scheduling import pool_events as events
from workflows.scheduling.pool import Action, Fence, Grant, Pool
from workflows.scheduling.queueing import blocked
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
    commands: list[AuditEntry] = Field(default_factory=list)
    """Human commands that are not in the audit table yet."""
    command_serial: int = 0
    rates: dict[str, dict[str, NodeRate]] = Field(default_factory=dict)
    """By node and role."""
    told: dict[str, str] = Field(default_factory=dict)
    """By request id: what its owner was last told that it waits for."""


@workflow.defn(name="ResourcePool", failure_exception_types=[ApplicationError])
class ResourcePool:
    """See the module. Id ``pool/<cluster>``; node agents start it with their first ``add_node``."""

    @workflow.init
    def __init__(self, state: PoolState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: PoolState) -> None:
        while not calls.must_continue_as_new() or self._busy():
            try:
                await workflow.wait_condition(self._busy, timeout=TICK)
            except TimeoutError:
                self._happens(events.Ticked(lost_after=LOST_AFTER_S))
            while self.state.outbox:
                await self._perform(self.state.outbox[0])
                self.state.outbox.pop(0)
            while self.state.commands:
                await self._record(self.state.commands[0])
                self.state.commands.pop(0)
            await self._tell_who_waits()
            self._show()
        workflow.continue_as_new(self.state)

    def _busy(self) -> bool:
        return bool(self.state.outbox or self.state.commands or self._news())

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
        self._happens(events.Added(node=node))
        return node_status(self.state.pool, info.id)

    @workflow.update(description='Replace a node\'s capability tags: {"node": "n1", "tags": ["rollout", "train"]}')
    def set_tags(self, order: SetTags) -> NodeStatus:
        self._commanded("set_tags", order, {"tags": sorted(order.tags)})
        self._happens(events.Tagged(node=order.node, tags=frozenset(order.tags)))
        return node_status(self.state.pool, order.node)

    @set_tags.validator
    def _check_set_tags(self, order: SetTags) -> None:
        self._must_know(order.node)
        if not order.tags:
            raise ApplicationError(f"tags of node {order.node} are empty: to take it out of service use drain")

    @workflow.update(
        description='End a node\'s lease and grant nothing on it: {"node": "n1"}; {"undo": true} reverses it'
    )
    def drain(self, order: DrainNode) -> NodeStatus:
        self._commanded("drain", order, {"undo": order.undo})
        self._happens(events.Drained(node=order.node, reason=_by(order), undo=order.undo))
        return node_status(self.state.pool, order.node)

    @drain.validator
    def _check_drain(self, order: DrainNode) -> None:
        self._must_know(order.node)

    @workflow.update(description='End a node\'s lease and forget the node: {"node": "n1"}')
    def remove_node(self, order: NodeName) -> str:
        self._commanded("remove_node", order, {})
        self._happens(events.Removed(node=order.node, reason=_by(order)))
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
        self._commanded("preempt", order, {"hold": order.hold, "lease": lease.key if lease else None})
        self._happens(events.Preempted(node=order.node, reason=order.reason, hold=order.hold))
        return f"revoked {lease.key}" if lease else "the node was free"

    @preempt.validator
    def _check_preempt(self, order: PreemptNode) -> None:
        self._must_know(order.node)

    @workflow.update(
        description='Declare a node dead, its lease is fenced and not waited for: {"node": "n1", "why": "power loss"}; '
        "it is back when its agent is heard of"
    )
    def lose_node(self, order: NodeName) -> NodeStatus:
        self._commanded("lose_node", order, {})
        self._happens(events.Lost(node=order.node, reason=_by(order)))
        return node_status(self.state.pool, order.node)

    @lose_node.validator
    def _check_lose(self, order: NodeName) -> None:
        self._must_know(order.node)

    @workflow.update(description='What a run may have from now on: {"run": "r1", "priority": 5, "quota": 4}')
    def set_share(self, order: SetShare) -> PoolStatus:
        what = {"priority": order.priority, "quota": order.quota}
        self._note(AuditEntry(run=order.run, actor=order.actor, what="set_share", why=order.why, data=what))
        self._happens(events.Shared(run=order.run, priority=order.priority, quota=order.quota))
        return self.status()

    @workflow.signal(description="Sent by node agents every few seconds.")
    def node_seen(self, seen: NodeSeen) -> None:
        self._happens(events.Seen(node=seen.node, boot_id=seen.boot_id, shares=frozenset(seen.shares)))
        self._rated(seen.node, seen.rates)

    @workflow.signal(description='A node is known to be dead: {"node": "n1", "boot_id": "b7"}')
    def node_lost(self, seen: NodeSeen) -> None:
        known = self.state.pool.nodes.get(seen.node)
        if known is not None and known.boot_id == seen.boot_id:
            self._happens(events.Lost(node=seen.node, reason="reported dead"))

    @workflow.signal(description="Sent when a node was measured: its place in the order of training.")
    def profiled(self, found: NodeProfiled) -> None:
        self._happens(events.Profiled(node=found.node, train_priority=found.train_priority))
        self._rated(found.node, found.rates)

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
        share = pools.Share(priority=request.spec.pool.priority, quota=request.spec.pool.quota)
        self._happens(events.Requested(demand=demand, share=share))

    @workflow.signal(description="The request is over: its leases are revoked.")
    def withdraw(self, order: WithdrawRequest) -> None:
        self._happens(events.Withdrawn(request_id=order.request_id, reason=order.reason))

    @workflow.signal(description="Sent by a lease when it has ended.")
    def release(self, release: ReleaseLease) -> None:
        self._happens(events.Released(lease=release.lease, epoch=release.epoch))
        self._forget_specs()

    @workflow.query(description="Nodes, leases, who waits for what, and the last decisions with their reasons.")
    def status(self) -> PoolStatus:
        return pool_status(self.state.pool, self.state.rates)

    @workflow.query(description="By run: the folder of the model that it trains.")
    def models(self) -> dict[str, str]:
        return {run: spec.model.path for run, spec in self.state.specs.items()}

    @workflow.query(description='Ids of nodes that can do a tag\'s work: "train"')
    def tagged(self, tag: str) -> list[str]:
        return [node.id for node in self.state.pool.tagged(tag)]

    @workflow.query(description='Tags whose shared work a node should do now, asked for by its agent: "n1"')
    def shared_work(self, node: str) -> list[str]:
        return self.state.pool.shared_work(node)

    # Mechanics

    def _happens(self, event: events.Event) -> None:
        outcome = events.apply(self.state.pool, event, workflow.now().timestamp())
        self.state.pool = outcome.pool
        self.state.outbox.extend(outcome.actions)

    def _rated(self, node: str, rates: Sequence[NodeRate]) -> None:
        known = self.state.rates.get(node, {}) | {rate.role: rate for rate in rates}
        if known and node in self.state.pool.nodes:
            self.state.rates[node] = known

    def _commanded(self, what: str, order: NodeCommand, data: dict[str, Any]) -> None:
        lease = self.state.pool.lease_of(order.node)
        why = order.why or (order.reason if isinstance(order, PreemptNode) else "")
        data = {"node": order.node, **data}
        self._note(AuditEntry(run=lease.run if lease else "", actor=order.actor, what=what, why=why, data=data))

    def _note(self, entry: AuditEntry) -> None:
        self.state.commands.append(entry)

    async def _record(self, entry: AuditEntry) -> None:
        """A child writes it down, so that a database that is away delays no grant."""
        self.state.command_serial += 1
        info = workflow.info()
        await workflow.start_child_workflow(
            "PoolCommand",
            entry,
            id=f"{info.workflow_id}/command/{info.first_execution_run_id[:8]}.{self.state.command_serial}",
            parent_close_policy=ParentClosePolicy.ABANDON,
            static_summary=f"{entry.what} by {entry.actor}",
        )

    def _news(self) -> dict[str, str]:
        """Requests that wait for something else than their owner was told; empty text: for nothing any more."""
        waits, told = blocked(self.state.pool), self.state.told
        return {
            request: waits.get(request, "") for request in {**waits, **told} if waits.get(request) != told.get(request)
        }

    async def _tell_who_waits(self) -> None:
        for request, text in self._news().items():
            self.state.told[request] = text
            if not text:
                del self.state.told[request]
            demand = self.state.pool.demands.get(request)
            notice = QueueNotice(request_id=request, waiting_for=text)
            if demand is not None and not await calls.tell(demand.owner, "queued", notice):
                self._happens(events.Withdrawn(request_id=request, reason="its owner has ended"))

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
            self._happens(events.Released(lease=lease.id, epoch=lease.epoch))
            return
        event = LeaseEvent.model_validate(
            {**task.model_dump(exclude={"owner", "pool", "spec", "run"}), "state": "granted"}
        )
        if not await calls.tell_owner(lease.owner, event):  # nobody is there to use it
            self._happens(events.Withdrawn(request_id=lease.request_id, reason="its owner has ended"))

    async def _tell_lease(self, lease: pools.Lease, signal: str, arg: Message) -> None:
        if not await calls.tell(calls.lease_id(lease.id, lease.epoch), signal, arg):
            self._happens(events.Released(lease=lease.id, epoch=lease.epoch))

    def _forget_specs(self) -> None:
        pool = self.state.pool
        runs = {d.run for d in pool.demands.values()} | {lease.run for lease in pool.leases.values()}
        self.state.specs = {run: spec for run, spec in self.state.specs.items() if run in runs}

    def _must_know(self, node: str) -> None:
        if node not in self.state.pool.nodes:
            known: Sequence[str] = sorted(self.state.pool.nodes)
            raise ApplicationError(f"node {node!r} is not in the pool; known nodes: {', '.join(known) or 'none'}")

    def _show(self) -> None:
        workflow.set_current_details(pool_page(self.status(), workflow.info().namespace))


def _by(order: NodeCommand) -> str:
    return f"asked for by {order.actor}" + (f": {order.why}" if order.why else "")
