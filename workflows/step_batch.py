"""The batch of a step: what may start for it, work ahead of it, and its claim."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityHandle

from workflows import calls
from workflows.messages import AdmissionInput, ClaimInput, ClaimResult, Revoke, StepUpdating
from workflows.step_base import StepStopped
from workflows.step_gang import StepGang

END_OF_DATA = "EndOfData"
LEAST_PATIENCE_S = 1.0


class StepBatch(StepGang):
    """What a step trains."""

    async def admit(self) -> None:
        self.set_phase("claiming")
        admission = AdmissionInput(spec=self.task.spec, step=self.task.step, paused=self.paused)
        await calls.locally("admit_step", admission, type(None), summary=f"admit for step {self.task.step}")

    async def work_ahead(self) -> None:
        """Have the gang, called from rollout where enough groups are complete, and let it accumulate groups as they
        are; a stop is for the main line to see."""
        part = None
        try:
            if self.lease is None and self.task.recall:
                part = await self.head_start.next_part(self.task.recall)
                if part is None:
                    return
                await self.until("the end of the pause", lambda: not self.paused or self.manifest is not None)
            lease = await self.acquire()
            self.set_phase("claiming")
            if self.manifest is None:
                await self.head_start.run(lease, part)
        except StepStopped:
            return

    async def claim(self) -> ClaimResult | None:
        """Claim a batch, or take the one to be replayed. A pause takes the waiting claim back."""
        since = workflow.now().timestamp()
        while self.manifest is None:
            await self.until("the end of the pause", lambda: not self.paused)
            self.preferred = self.head_start.taken
            handle = calls.on_control(
                "claim_batch",
                self._claim_input(since),
                ClaimResult,
                limit=calls.FOREVER,
                summary=f"batch of step {self.task.step}",
            )
            try:
                await self._return_if_late(handle)
                await self.until("enough complete groups", self._claim_settled(handle))
            finally:
                calls.call_off([handle])
            if handle.done():
                try:
                    result = await handle
                except ActivityError as error:
                    if isinstance(error.cause, ApplicationError) and error.cause.type == END_OF_DATA:
                        return None
                    raise
                self.manifest = result.manifest
                await self._tell_updating(result.pending)
                return result
        await self._tell_updating(0)  # a replay
        return None

    async def _return_if_late(self, handle: ActivityHandle[ClaimResult]) -> None:
        """A gang that was kept from rollout for this batch waits for it no longer than two changes would take."""
        lease = self.lease
        if lease is None or self.task.policy.trainers == "own" or self.task.policy.accumulates:
            return
        patience = max(LEAST_PATIENCE_S, 2 * (self.task.cost.total_s or 0.0))
        claimed = self._claim_settled(handle)
        try:
            await workflow.wait_condition(lambda: self.stopping or claimed(), timeout=timedelta(seconds=patience))
        except TimeoutError:
            self.lease = None
            reason = f"the batch of step {self.task.step} is late: its nodes roll out meanwhile"
            await calls.tell(calls.lease_id(lease.lease, lease.epoch), "revoke", Revoke(reason=reason))

    def _claim_input(self, since: float) -> ClaimInput:
        task = self.task
        shares = task.policy.trainers == "preempt" and not task.policy.holds_rollout
        takes = shares and self.lease is None and not task.policy.accumulates
        return ClaimInput(
            spec=task.spec,
            lineage=task.lineage,
            step=task.step,
            version=task.version,
            cost_s=task.cost.total_s if takes else None,
            prefer=self.preferred,
            since=since,
        )

    async def _tell_updating(self, leftover: int) -> None:
        """The run holds what still rolls out, if the pipeline does not let it overlap with an update."""
        await calls.tell(self.task.owner, "updating", StepUpdating(step=self.task.step, leftover=leftover))

    def _claim_settled(self, handle: ActivityHandle[ClaimResult]) -> Callable[[], bool]:
        """Claimed; or to be asked for anew, because of a pause or of further groups that it must hold."""
        return lambda: handle.done() or self.paused or self.preferred != self.head_start.taken
