"""What models on nodes of their own do for a step: they say what they can of its batch, and a critic learns from it.

Whatever a gang is asked for is asked again until it is done: one whose lease ends, or whose ranks die, gives its place
to another node with the tag, or to the same one once it is back. What is said is an object in the store; its key and
digest go to the trainer's ranks with the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityHandle

from workflows import calls
from workflows.algorithm import Companion
from workflows.messages import (
    ColumnRef,
    CompanionView,
    ManifestRef,
    Revoke,
    StepInput,
    TrainInterval,
    TrainOutcome,
)
from workflows.step_base import StepBase

T = TypeVar("T")
Start = Callable[[CompanionView], list[ActivityHandle[T]]]
"""Sends some work to every member of a gang."""
HOPELESS = calls.STOPS_THE_RUN | {"IntegrityError", "NotFoundError"}
"""Failures that no other node would be spared."""
TRIES = 5
"""Work is given up with the step when so many attempts at it were lost."""


class StepCompanions(StepBase):
    """Reference and critic of a step, as far as the algorithm has them apart."""

    def __init__(self, task: StepInput) -> None:
        super().__init__(task)
        self.working: set[str] = set()
        """Leases that have work of this step."""
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
        parts = await asyncio.gather(*(self._columns(role, manifest) for role in apart))
        if apart:
            self.told_at = workflow.now()
        return tuple(ref for part in parts for ref in part)

    async def critic_learns(
        self, manifest: ManifestRef, columns: tuple[ColumnRef, ...], trained: TrainOutcome
    ) -> TrainOutcome | None:
        """Have a critic apart make the step too, once the policy has and the returns are known; None if there is none.

        Nothing of the step is committed yet: if either gang is lost now, both go back to their last common checkpoint.
        """
        if "critic" not in self.task.spec.algorithm.companions_apart:
            return None
        if trained.returns is None:
            raise ApplicationError(f"step {manifest.step} reported no returns for its critic", non_retryable=True)
        self.set_phase("critic")
        told, dropped = (*columns, trained.returns), trained.dropped
        outcomes = await self._done_by(
            "critic", "learn from", lambda c: calls.train_critic(self.task, c, manifest, told, dropped)
        )
        self.companions_busy += [TrainInterval(node=o.node, start=o.start, end=o.end, kind="critic") for o in outcomes]
        leader = next((o for o in outcomes if o.checkpoint), None)
        if leader is None:
            raise ApplicationError("no member of the critic's gang has rank 0: no checkpoint was reported")
        return leader

    async def _columns(self, role: Companion, manifest: ManifestRef) -> list[ColumnRef]:
        """In as many shares as gangs of the role are ready; a critic has one."""
        await self.until(self._wait_for(role, manifest.step), lambda: bool(self._companions(role)))
        shares = len(self._companions(role))

        async def share(number: int) -> ColumnRef:
            what = f"compute share {number + 1} of {shares} of"
            start = lambda c: calls.compute_columns(self.task, c, manifest, number, shares)  # noqa: E731
            outcomes = await self._done_by(role, what, start)
            self.companions_busy += [outcome.busy for outcome in outcomes]
            return outcomes[0].column

        return list(await asyncio.gather(*map(share, range(shares))))

    async def _done_by(self, role: Companion, what: str, start: Start[T]) -> list[T]:
        """Have an idle gang of the role do some work, which is told of by its name, until one has."""
        why = ""
        for _ in range(TRIES):
            waits = f"{self._wait_for(role, self.task.step)} to {what} its batch"
            while not (idle := self._idle(role)):  # another share may have woken first, and have taken it
                await self.until(f"{waits} ({why})" if why else waits, lambda: bool(self._idle(role)))
            companion = idle[0]
            self.working.add(companion.lease)
            handles = start(companion)
            try:
                found = await self._outcomes(handles, companion, what)
            except ActivityError as error:
                why = _raise_if_hopeless(error)
                await self._give_up(companion, why)
                continue
            finally:
                self.working.discard(companion.lease)
                calls.call_off(handles)
            if found is not None:
                return found
            why = f"its lease of {', '.join(companion.members)} has ended"
        raise ApplicationError(
            f"the {role} was lost {TRIES} times when it was to {what} the batch of step {self.task.step}; the last "
            f"time: {why}",
            type="GangLost",
            non_retryable=True,
        )

    async def _outcomes(
        self, handles: Sequence[ActivityHandle[T]], companion: CompanionView, what: str
    ) -> list[T] | None:
        """Of all members; None if their lease ends first. Raises what one of them says as soon as one fails."""
        waits = f"{companion.role} on {', '.join(companion.members)} to {what} the batch"
        await self.until(waits, lambda: settled(handles) or not self._lives(companion))
        if not settled(handles):
            return None
        return [await handle for handle in sorted(handles, key=without_result)]

    async def _give_up(self, companion: CompanionView, why: str) -> None:
        """End a lease whose ranks have failed, which ends them if they still live; the pool grants a new one."""
        await calls.tell(calls.lease_id(companion.lease, companion.epoch), "revoke", Revoke(reason=why))
        await self.until(f"the lease of {companion.members[0]} to end", lambda: not self._lives(companion))

    def _wait_for(self, role: Companion, step: int) -> str:
        return f"a node with the tag {role!r} that is ready for step {step}"

    def _companions(self, role: Companion) -> list[CompanionView]:
        """Those that are ready."""
        return [one for one in self.have if one.role == role and one.state == "ready"]

    def _idle(self, role: Companion) -> list[CompanionView]:
        return [one for one in self._companions(role) if one.lease not in self.working]

    def _lives(self, companion: CompanionView) -> bool:
        return companion in self.have


def without_result(handle: ActivityHandle[T]) -> bool:
    """Order of waiting: one that has failed says why the others do not end."""
    return not handle.done()


def settled(handles: Sequence[ActivityHandle[T]]) -> bool:
    """All members are done, or one has failed."""
    return all(h.done() for h in handles) or any(h.done() and h.exception() is not None for h in handles)


def _raise_if_hopeless(error: ActivityError) -> str:
    """Why an attempt was lost; raises if the next one would be lost the same way."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.type in HOPELESS:
        raise ApplicationError(cause.message, type=cause.type, non_retryable=True) from None
    return calls.reason_of(error)
