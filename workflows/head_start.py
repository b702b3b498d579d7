"""Work on a step's groups ahead of its batch: they are accumulated by the gang as they become complete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow
from temporalio.exceptions import ActivityError

from workflows import calls
from workflows.messages import ColumnRef, LeaseEvent, ManifestRef, PartInput, PartResult, StepInput, TrainInterval


async def _nothing(manifest: ManifestRef) -> tuple[ColumnRef, ...]:
    """Where the gang holds every model."""
    return ()


class HeadStart:
    """One step's; ``end`` once the batch is claimed: what is in work is finished, nothing more begins.

    ``taken``: groups that are accumulated or about to be; the batch has to hold them. ``busy``: when nodes trained.
    ``failed``: why it ended early; the update computes what it did not. ``told``: asks models on other nodes for what
    they say of a part.
    """

    def __init__(self, task: StepInput) -> None:
        self._task = task
        self._ended = False
        self.told: Callable[[ManifestRef], Awaitable[tuple[ColumnRef, ...]]] = _nothing
        self.taken: tuple[int, ...] = ()
        self.busy: list[TrainInterval] = []
        self.failed = ""

    def end(self) -> None:
        self._ended = True

    async def run(self, lease: LeaseEvent, part: PartResult | None = None) -> None:
        """Accumulate part after part until the end, ``part`` first; each is looked for while the one before it is
        computed, so that the gang goes from one to the next."""
        ahead: asyncio.Task[PartResult | None] | None = None
        try:
            while not self._ended:
                part = part or await (ahead or self.next_part())
                if part is not None:
                    ahead = asyncio.create_task(self.next_part())
                    await self._accumulate(lease, part)
                part = None
        except ActivityError as error:
            self.failed = calls.reason_of(error)
        finally:
            if ahead is not None:
                ahead.cancel()

    async def next_part(self, least: int | None = None) -> PartResult | None:
        """Wait for groups, at least so many; None if the end comes sooner."""
        task = self._task
        ask = PartInput(spec=task.spec, lineage=task.lineage, step=task.step, done=self.taken, least=least)
        handle = calls.on_control(
            "next_part", ask, PartResult, limit=calls.FOREVER, summary=f"a part of the batch of step {task.step}"
        )
        try:
            await workflow.wait_condition(lambda: handle.done() or self._ended)
        finally:
            calls.call_off([handle])
        if not handle.done():
            return None
        part = await handle
        self.taken += part.ordinals
        return part

    async def _accumulate(self, lease: LeaseEvent, part: PartResult) -> None:
        summary = f"{len(part.ordinals)} groups of step {self._task.step} ahead of their batch"
        columns = await self.told(part.manifest)
        handles = calls.on_gang(
            "accumulate", self._task, lease, part.manifest, TrainInterval, summary=summary, columns=columns
        )
        self.busy += [await handle for handle in handles]
