"""An engine's lease: its route is kept equal to what the engine confirmed it serves."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.exceptions import ActivityError

from workflows import calls
from workflows.messages import EngineHold, EngineTask, MemberReport, RouteInput, WeightsRef
from workflows.queues import nodectl_queue

if TYPE_CHECKING:
    from workflows.lease import Lease

RETRY_LOAD = timedelta(seconds=15)
"""Until weights that could not be loaded are tried again; twice as long after each failure."""
MAX_DOUBLINGS = 4
LOAD_SLACK_S = 60.0
"""For the pause before a load and the resumption after it."""
LOAD_ERRORS = ("EngineRejected", "EngineUnavailable", "EngineProtocolError")


class EngineRole:
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
