"""What models on nodes of their own say of a step's batch: asked for in shares, each asked again until it is written.

A share whose lease ends, or whose ranks die, goes to another node with the tag, or to the same one once it is back. The
answer is an object in the store; its key and digest go to the trainer's ranks with the batch.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityHandle

from workflows import calls
from workflows.algorithm import Companion
from workflows.messages import (
    ColumnRef,
    ColumnsOutcome,
    CompanionView,
    ManifestRef,
    Revoke,
    StepInput,
    TrainInterval,
)
from workflows.step_base import StepBase, StepStopped

HOPELESS = calls.STOPS_THE_RUN | {"IntegrityError", "NotFoundError"}
"""Failures of a share that no other node would be spared."""
SHARE_TRIES = 5
"""A share is given up with the step when so many attempts at it were lost."""


class StepCompanions(StepBase):
    """Reference and critic of a step, as far as the algorithm has them apart."""

    def __init__(self, task: StepInput) -> None:
        super().__init__(task)
        self.have = task.companions
        self.working: set[str] = set()
        """Leases that compute a share."""
        self.told_at: datetime | None = None
        self.companions_busy: list[TrainInterval] = []
        self.head_start.told = self.told_by_companions

    @workflow.signal(description="Sent by the run: its leases of reference and critic, as of now.")
    def companions(self, views: list[CompanionView]) -> None:
        self.have = tuple(views)
        self.show()

    async def told_by_companions(self, manifest: ManifestRef) -> tuple[ColumnRef, ...]:
        """The columns of every model apart. Raises :class:`StepStopped`, or what no other attempt would cure."""
        apart = self.task.spec.algorithm.companions_apart
        parts = [await self._column(role, manifest) for role in apart]
        if apart:
            self.told_at = workflow.now()
        return tuple(ref for part in parts for ref in part)

    async def _column(self, role: Companion, manifest: ManifestRef) -> list[ColumnRef]:
        waits = f"a node with the tag {role!r} that is ready for step {manifest.step}"
        await self.until(waits, lambda: bool(self._companions(role)))
        shares = len(self._companions(role))
        return list(await asyncio.gather(*(self._share(role, manifest, n, shares) for n in range(shares))))

    async def _share(self, role: Companion, manifest: ManifestRef, share: int, shares: int) -> ColumnRef:
        why = ""
        for _ in range(SHARE_TRIES):
            waits = f"a node with the tag {role!r} to compute share {share + 1} of {shares} of step {manifest.step}"
            await self.until(f"{waits} ({why})" if why else waits, lambda: bool(self._idle(role)))
            companion = self._idle(role)[0]
            handle = calls.compute_columns(self.task, companion, manifest, share, shares)
            self.working.add(companion.lease)
            try:
                found = await self._outcome(handle, companion)
            except ActivityError as error:
                why = _raise_if_hopeless(error)
                await self._give_up(companion, why)
                continue
            finally:
                self.working.discard(companion.lease)
            if found is not None:
                self.companions_busy.append(found.busy)
                return found.column
            why = f"its lease of {companion.members[0]} has ended"
        raise ApplicationError(
            f"share {share + 1} of {shares} of what the {role} says of step {manifest.step} was lost {SHARE_TRIES} "
            f"times; the last time: {why}",
            type="GangLost",
            non_retryable=True,
        )

    async def _outcome(self, handle: ActivityHandle[ColumnsOutcome], companion: CompanionView) -> ColumnsOutcome | None:
        """None if the lease ends first."""
        what = f"{companion.role} on {companion.members[0]} to compute its share of the batch"
        try:
            await self.until(what, lambda: handle.done() or not self._lives(companion))
        except StepStopped:
            handle.cancel()
            raise
        if handle.done():
            return await handle
        handle.cancel()
        return None

    async def _give_up(self, companion: CompanionView, why: str) -> None:
        """End a lease whose ranks have failed, which ends them if they still live; the pool grants a new one."""
        await calls.tell(calls.lease_id(companion.lease, companion.epoch), "revoke", Revoke(reason=why))
        await self.until(f"the lease of {companion.members[0]} to end", lambda: not self._lives(companion))

    def _companions(self, role: Companion) -> list[CompanionView]:
        """Those that are ready."""
        return [one for one in self.have if one.role == role and one.state == "ready"]

    def _idle(self, role: Companion) -> list[CompanionView]:
        return [one for one in self._companions(role) if one.lease not in self.working]

    def _lives(self, companion: CompanionView) -> bool:
        return companion in self.have


def _raise_if_hopeless(error: ActivityError) -> str:
    """Why an attempt was lost; raises if the next one would be lost the same way."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.type in HOPELESS:
        raise ApplicationError(cause.message, type=cause.type, non_retryable=True) from None
    return calls.reason_of(error)
