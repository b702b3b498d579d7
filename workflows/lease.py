"""``Lease``: the right of an engine or a trainer gang to use its nodes, and the only sequencer of its members.

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
from workflows.messages import (
    CheckpointRef,
    EngineHold,
    EngineTask,
    GangView,
    HoldLease,
    LeaseEvent,
    LeaseInput,
    LeaseView,
    MemberLost,
    MemberReport,
    ReleaseLease,
    Revoke,
    RouteInput,
    TrainerTask,
    WeightsRef,
)
from workflows.queues import nodectl_queue
from workflows.scheduling.gang import GangPlan, plan_gang
from workflows.spec import RunSpec

RETRY_LOAD = timedelta(seconds=15)
"""Until weights that could not be loaded are tried again; twice as long after each failure."""
MAX_DOUBLINGS = 4
LOAD_SLACK_S = 60.0
"""For the pause before a load and the resumption after it."""
LOAD_ERRORS = ("EngineRejected", "EngineUnavailable", "EngineProtocolError")


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
        role = _EngineRole(self) if task.role == "engine" else _TrainerRole(self)
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

    async def _park(self, role: _EngineRole | _TrainerRole) -> str:
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


class _EngineRole:
    """Keeps one engine's route equal to what the engine confirmed it serves."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.node = lease.task.members[0]
        self.held = False
        self.applied: MemberReport | None = None
        self.url = ""
        self.failed_version: int | None = None
        self.failures = 0
        """Loads that failed since one went well."""

    async def serve(self) -> None:
        lease = self.lease
        newest = await calls.locally("latest_weights", lease.task.run, WeightsRef, summary="newest published weights")
        lease.load_weights(newest)
        lease.supervisors[self.node] = calls.supervise(
            "engine_supervise",
            self._task(newest),
            node=self.node,
            summary=f"engine of {lease.task.run} on {self.node}",
        )
        while not lease.ending():
            lease.dirty = False
            await self._converge()
            if not lease.dirty:
                pause = RETRY_LOAD * 2 ** min(self.failures - 1, MAX_DOUBLINGS) if self.failures else None
                if not await lease.change(self._wait_name(), pause):
                    self.failed_version = None  # time to try that load again
        lease.raise_if_lost()

    async def quiesce(self) -> None:
        await self._close_route()

    def _wait_name(self) -> str:
        if self.lease.version is None:
            return "the engine to be ready"
        return f"another try to load version {self.failed_version}" if self.failures else "a command"

    async def _converge(self) -> None:
        """One pass from what is to what should be. Revoke outranks load: checked again after every wait."""
        lease = self.lease
        report = lease.reports.get(self.node)
        if report is None:
            return
        if report is not self.applied:  # another process, or the same one found again
            self.applied = report
            if report.state == "down":
                await self._went_down(report)
            else:
                self.url, lease.version = report.url or "", report.version
        if lease.version is None:
            return
        if lease.hold_wanted != self.held:
            await self._set_hold(lease.hold_wanted)
        if self.held or lease.ending():
            return
        if lease.target is not None and self._behind():
            await self._load(lease.target)
        if not lease.ending() and not self._behind():
            await self._open_route()

    def _behind(self) -> bool:
        """Whether newer weights are published than the engine serves."""
        target, version = self.lease.target, self.lease.version
        return target is not None and version is not None and target.version > version

    async def _went_down(self, report: MemberReport) -> None:
        self.lease.last_failure = report.detail
        self.lease.version = None
        self.held = False
        await self._close_route()
        self.lease.set_phase("starting")
        await self.lease.report("down", report.detail)

    async def _set_hold(self, hold: bool) -> None:
        if hold:
            await self._close_route()
        order = EngineHold(run=self.lease.task.run, epoch=self.lease.task.epoch, node=self.node, hold=hold)
        handle = calls.on_node(
            "engine_hold",
            order,
            type(None),
            queue=nodectl_queue(self.node),
            limit_s=60,
            summary="pause the engine" if hold else "resume the engine",
        )
        await self.lease.until("the engine to pause" if hold else "the engine to resume", handle)
        await handle
        self.held = hold
        self.lease.set_phase("held" if hold else "serving")

    async def _load(self, weights: WeightsRef) -> None:
        """Hold the route, let the engine load and confirm. If that fails or takes too long, the engine stays on weights
        that are known, kept or loaded after a restart, and has no route until it serves the newest."""
        lease = self.lease
        if self.failed_version == weights.version:
            return
        lease.set_phase(f"loading version {weights.version}")
        if lease.route.startswith("open"):
            await self._put_route("held")
        handle = calls.on_node(
            "engine_load",
            self._task(weights),
            int,
            queue=nodectl_queue(self.node),
            limit_s=lease.task.spec.engine.load_limit_s + LOAD_SLACK_S,
            attempts=2,
            permanent=LOAD_ERRORS,
            summary=f"load version {weights.version} on {self.node}",
        )
        try:
            await lease.until(f"version {weights.version} to load", handle, revocable=True)
            if handle.done():
                lease.version = await handle
                self.failed_version, self.failures = None, 0
        except ActivityError as error:
            await self._load_failed(weights, calls.reason_of(error))

    async def _load_failed(self, weights: WeightsRef, reason: str) -> None:
        lease = self.lease
        lease.last_failure = f"version {weights.version} was not loaded: {reason}"
        self.failed_version, self.failures = weights.version, self.failures + 1
        await self._close_route()
        lease.set_phase(f"out of service: version {lease.version}, not {weights.version}")
        await lease.report("down", lease.last_failure)

    async def _open_route(self) -> None:
        wanted = f"open {self.lease.version} {self.url}"
        if self.lease.route == wanted:
            return
        await self._put_route("open")
        self.lease.route = wanted
        self.lease.set_phase(f"serving version {self.lease.version}")
        await self.lease.report("ready")

    async def _put_route(self, state: str) -> None:
        route = self._route().model_copy(update={"state": state})
        await calls.locally("put_route", route, type(None), summary=f"route of {self.node}: {state}")
        self.lease.route = f"{state} {self.lease.version} {self.url}"

    async def _close_route(self) -> None:
        if self.lease.route == "closed" or not self.url:
            return
        await calls.locally("close_route", self._route(), type(None), summary=f"close the route of {self.node}")
        self.lease.route = "closed"

    def _route(self) -> RouteInput:
        task = self.lease.task
        return RouteInput(
            run=task.run,
            lease=task.lease,
            epoch=task.epoch,
            node=self.node,
            url=self.url,
            engine_kind=task.spec.engine.kind,
            version=self.lease.version or 0,
        )

    def _task(self, weights: WeightsRef) -> EngineTask:
        task = self.lease.task
        return EngineTask(
            run=task.run, lease=task.lease, epoch=task.epoch, node=self.node, spec=task.spec, weights=weights
        )


class _TrainerRole:
    """Brings one gang up, or finds it still there, and watches it until the lease ends."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    async def serve(self) -> None:
        lease = self.lease
        task = lease.task
        views = await self._probe()
        newest = await calls.locally("latest_checkpoint", task.run, CheckpointRef, summary="newest checkpoint")
        plan = plan_gang(f"{task.lease}/{task.epoch}", {n.id: n.ranks for n in task.spec.nodes}, views, newest.version)
        lease.set_phase(f"{'attaching to' if plan.attached else 'starting'} gang {plan.gang}")
        for member in task.members:
            lease.supervisors[member] = calls.supervise(
                "trainer_supervise",
                trainer_task(task.spec, plan, member, newest, lease=task.lease, epoch=task.epoch),
                node=member,
                summary=f"{plan.ranks[member]} rank(s) of {task.run} on {member}",
            )
        while not lease.ending() and not self._all_ready():
            lease.dirty = False
            await lease.change("the ranks to be ready")
        if not lease.ending():
            lease.set_phase("training")
            await lease.report("ready")
        while not lease.ending():
            lease.dirty = False
            await lease.change("the end of the lease")
        lease.raise_if_lost()

    async def quiesce(self) -> None:
        """Nothing to do before the cancel: a supervisor lets a running update end."""

    async def _probe(self) -> list[GangView]:
        handles = [calls.gang_probe(self.lease.task.run, member) for member in self.lease.task.members]
        for handle in handles:
            await self.lease.until("the members to say which ranks they have", handle)
        return [await handle for handle in handles]

    def _all_ready(self) -> bool:
        reports = self.lease.reports
        return all(m in reports and reports[m].state == "ready" for m in self.lease.task.members)


def trainer_task(
    spec: RunSpec, plan: GangPlan, node: str, newest: CheckpointRef, *, lease: str, epoch: int
) -> TrainerTask:
    """One member's share of a gang; ``epoch`` 0 starts ranks ahead of any lease."""
    return TrainerTask(
        run=spec.run,
        lease=lease,
        epoch=epoch,
        node=node,
        gang=plan.gang,
        first_rank=plan.first_rank[node],
        ranks=plan.ranks[node],
        world_size=plan.world_size,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        checkpoint=newest,
        spec=spec,
    )
