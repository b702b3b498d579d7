"""``Lease``: the right of an engine or a gang (trainer, reference, critic) to use its nodes, and their only sequencer.

A lease owns one long supervising activity per member, started on the member's
own queue. It ends when it is revoked (members park), when a member is lost
(fenced, not waited for) or when a supervisor gives up. Whatever happens, it
ends by telling the pool (``release``) and its owner.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception
from temporalio.workflow import ActivityHandle

from workflows import calls
from workflows.engine_lease import EngineRole
from workflows.gang_lease import GangLease
from workflows.messages import (
    HoldLease,
    LeaseEvent,
    LeaseInput,
    LeaseView,
    MemberLost,
    MemberReport,
    ReleaseLease,
    Revoke,
    WeightsRef,
)


class LeaseLost(Exception):
    """A member failed or its node is dead."""


@workflow.defn(name="Lease", failure_exception_types=[Exception])
class Lease:
    """See the module. Started by the pool; never continued as new: one activity a member and a few signals."""

    @workflow.init
    def __init__(self, task: LeaseInput) -> None:
        self.task = task
        self.phase = "starting"
        self.waiting_for = ""
        self.last_failure = ""
        self.revoke_order: Revoke | None = None
        self.dead: dict[str, str] = {}
        self.hold_wanted = False
        self.target: WeightsRef | None = None
        self.reports: dict[str, MemberReport] = {}
        self.supervisors: dict[str, ActivityHandle[None]] = {}
        self.dirty = False
        self.route = "none"
        self.version: int | None = None

    # Messages

    @workflow.signal(description='End the lease and park: {"reason": "maintenance"}')
    def revoke(self, order: Revoke) -> None:
        self.revoke_order = self.revoke_order or order
        self.dirty = True

    @workflow.signal(description='A node is dead, do not wait for it: {"node": "n1", "reason": "power loss"}')
    def member_lost(self, loss: MemberLost) -> None:
        if loss.node in self.task.members:
            self.dead[loss.node] = loss.reason
            self.dirty = True

    @workflow.signal(description='Load weights: {"version": 3, "path": "/weights/3", "digest": "ab.."}')
    def load_weights(self, weights: WeightsRef) -> None:
        if self.target is None or weights.version > self.target.version:
            self.target = weights
            self.dirty = True

    @workflow.signal(description='Close the route and pause (true) or serve again (false): {"hold": true}')
    def hold(self, order: HoldLease) -> None:
        self.hold_wanted = order.hold
        self.dirty = True

    @workflow.signal(description="Sent by supervisors: how a member is.")
    def member_report(self, report: MemberReport) -> None:
        known = self.reports.get(report.node)
        if known is None or report.seq >= known.seq:
            self.reports[report.node] = report
            self.dirty = True

    @workflow.query(description="Phase, version, route and what the lease waits for.")
    def status(self) -> LeaseView:
        return LeaseView(
            lease=self.task.lease,
            epoch=self.task.epoch,
            phase=self.phase,
            version=self.version,
            route=self.route,
            waiting_for=self.waiting_for,
            last_failure=self.last_failure,
        )

    # Life

    @workflow.run
    async def run(self, task: LeaseInput) -> None:
        workflow.upsert_search_attributes(
            [
                calls.SF_RUN.value_set(task.run),
                calls.SF_NODE.value_set(task.members[0]),
                calls.SF_TAGS.value_set([task.role]),
            ]
        )
        role = EngineRole(self) if task.role == "engine" else GangLease(self)
        lost = ""
        try:
            await role.serve()
        except asyncio.CancelledError:  # "cancel" in the UI: the same as a revoke
            self.revoke_order = self.revoke_order or Revoke(reason="cancelled")
        except (ActivityError, LeaseLost) as error:
            lost = calls.reason_of(error)
        self.set_phase("quiescing")
        lost = await self._park(role) or lost
        await self._end(lost)

    def ending(self) -> bool:
        """Whether the lease has to end: revoked, a member dead, or a supervisor done."""
        return bool(self.revoke_order or self.dead) or any(h.done() for h in self.supervisors.values())

    def raise_if_lost(self) -> None:
        """Raise what ended the lease, unless it was revoked in order."""
        for node, reason in self.dead.items():
            raise LeaseLost(f"node {node}: {reason}")
        if self.revoke_order is None:
            for handle in self.supervisors.values():
                if handle.done():
                    handle.result()
                    raise LeaseLost("a supervisor ended by itself")

    async def until(self, what: str, handle: ActivityHandle[Any], *, revocable: bool = False) -> None:
        """Wait for an activity on a member, but not longer than the member lives, nor, if it is ``revocable``, than the
        lease: then it is cancelled and not done."""
        self.waiting_for = what
        await workflow.wait_condition(
            lambda: handle.done() or bool(self.dead) or (revocable and self.revoke_order is not None)
        )
        self.waiting_for = ""
        if not handle.done():
            handle.cancel()
            self.raise_if_lost()

    async def change(self, what: str, at_most: timedelta | None = None) -> bool:
        """Wait until a message changes something or the lease has to end; False if neither came in time."""
        self.waiting_for = what
        try:
            await workflow.wait_condition(lambda: self.dirty or self.ending(), timeout=at_most)
        except TimeoutError:
            return False
        finally:
            self.waiting_for = ""
        return True

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        workflow.set_current_details(
            f"**{self.task.lease}** epoch {self.task.epoch}: {phase}  \n"
            f"nodes: {', '.join(self.task.members)}  \nversion: {self.version}, route: {self.route}  \n"
            f"last failure: {self.last_failure or 'none'}"
        )

    async def report(self, state: str, reason: str = "") -> None:
        """Tell the owner how the lease is."""
        event = LeaseEvent.model_validate(
            {
                "lease": self.task.lease,
                "epoch": self.task.epoch,
                "role": self.task.role,
                "members": self.task.members,
                "state": state,
                "version": self.version,
                "gang": next((r.gang for r in self.reports.values() if r.gang), None),
                "reason": reason,
            }
        )
        await calls.tell_owner(self.task.owner, event)

    async def _park(self, role: EngineRole | GangLease) -> str:
        """Cancel the supervisors and wait until their members are parked. Returns why one was lost, if so."""
        await role.quiesce()
        lost = ""
        for handle in self.supervisors.values():
            handle.cancel()
        for node, handle in self.supervisors.items():
            self.waiting_for = f"{node} to park"
            await workflow.wait_condition(partial(self._parked_or_dead, node))
            if not handle.done():
                lost = lost or f"node {node}: {self.dead[node]}"
            elif (error := handle.exception()) is not None and not _was_cancelled(error):
                lost = lost or calls.reason_of(error)
        self.waiting_for = ""
        return lost

    def _parked_or_dead(self, node: str) -> bool:
        return self.supervisors[node].done() or node in self.dead

    async def _end(self, lost: str) -> None:
        self.last_failure = lost
        self.set_phase("lost" if lost else "parked")
        release = ReleaseLease(lease=self.task.lease, epoch=self.task.epoch)
        await calls.tell(self.task.pool, "release", release)
        why = self.revoke_order.reason if self.revoke_order else ""
        await self.report("lost" if lost else "revoked", lost or why)


def _was_cancelled(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError) or is_cancelled_exception(error)
