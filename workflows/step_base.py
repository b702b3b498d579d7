"""What all parts of a step share: its state, the messages that change it, named waits, phases and the page it shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from temporalio import workflow

from workflows import calls
from workflows.head_start import HeadStart
from workflows.markdown import link, page
from workflows.messages import (
    LeaseEvent,
    QueueNotice,
    StepInput,
    StepPause,
    StepStatus,
    Stop,
    WithdrawRequest,
)


class StepStopped(Exception):
    """The run told the step to stop at once."""


class StepBase:
    """State and mechanics; the rest of :class:`workflows.rl_step.RlStep` is made of its subclasses."""

    def __init__(self, task: StepInput) -> None:
        self.task = task
        self.phase = "claiming"
        self.waiting_for = ""
        self.paused = task.paused
        self.stopping = False
        self.manifest = task.replay
        self.lease = task.gang
        self.have = task.companions
        self.lost = ""
        self.queue_notice = ""
        self.granted_at: datetime | None = None
        self.requested_at: datetime | None = None
        self.requested = ""
        self.ready_at: datetime | None = None
        self.preferred: tuple[int, ...] = ()
        self.head_start = HeadStart(task)

    # Messages

    @workflow.signal(description='Claim nothing while paused: {"paused": true}')
    def pause(self, order: StepPause) -> None:
        self.paused = order.paused

    @workflow.signal(description='End the step at once, sent by the run: {"mode": "now"}')
    def stop(self, order: Stop) -> None:
        self.stopping = True

    @workflow.signal(description="Sent by the run: what has become of its trainer lease.")
    def gang(self, event: LeaseEvent) -> None:
        current = self.lease is None or event.epoch >= self.lease.epoch
        if event.state in ("granted", "ready") and current:
            if event.state == "granted":
                self.granted_at = workflow.now()
            if event.state == "ready":
                self.ready_at = workflow.now()
            self.lease, self.lost = event, ""
            return
        mine = self.lease is not None and event.epoch == self.lease.epoch
        if mine and (event.state == "lost" or self.phase != "training"):  # a revoked gang ends its update, then parks
            self.lease, self.lost = None, event.reason or event.state

    @workflow.signal(description="Sent by the pool: what the request for the gang waits for; empty: nothing.")
    def queued(self, notice: QueueNotice) -> None:
        self.queue_notice = notice.waiting_for
        self.show()

    @workflow.query(description="Phase, manifest, lease and what the step waits for.")
    def status(self) -> StepStatus:
        return StepStatus(
            lineage=self.task.lineage,
            step=self.task.step,
            phase=self.phase,
            waiting_for=self._waiting(),
            manifest=self.manifest,
            lease=f"{self.lease.lease}/{self.lease.epoch}" if self.lease else None,
            companions=self.have,
        )

    # For all parts

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """A named wait that a stop ends."""
        self.waiting_for = what
        self.show()
        await workflow.wait_condition(lambda: self.stopping or condition())
        self.waiting_for = ""
        if self.stopping and not condition():
            await self._take_back_request()
            raise StepStopped

    def _waiting(self) -> str:
        return (
            f"{self.waiting_for} ({self.queue_notice})" if self.waiting_for and self.queue_notice else self.waiting_for
        )

    async def _take_back_request(self) -> None:
        if self.requested and self.lease is None:
            order = WithdrawRequest(request_id=self.requested, reason="the step was stopped")
            await calls.tell(self.task.pool, "withdraw", order)

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        workflow.upsert_search_attributes(
            [
                calls.SF_RUN.value_set(self.task.spec.run),
                calls.SF_STEP.value_set(self.task.step),
                calls.SF_PHASE.value_set(phase),
            ]
        )
        self.show()

    def show(self) -> None:
        """Renew the page that the UI shows; it is no part of history."""
        if not workflow.in_workflow():  # a worker that stops collects its workflows; their waits end outside of any
            return
        namespace = workflow.info().namespace
        lines = [f"### {self.task.spec.run}, step {self.task.step}: {self.phase}", ""]
        if self.waiting_for:
            lines += [f"Waits for {self._waiting()}.", ""]
        if self.lease:
            lease = calls.lease_id(self.lease.lease, self.lease.epoch)
            lines += [f"* trains on {', '.join(self.lease.members)} ({link('lease', namespace, lease)})"]
        if self.manifest:
            lines += [f"* batch: `{self.manifest.key}`, digest `{self.manifest.digest}`"]
        run = link(self.task.spec.run, namespace, calls.run_id(self.task.spec.run))
        workflow.set_current_details(page([*lines, f"* run: {run}, lineage {self.task.lineage}"]))
