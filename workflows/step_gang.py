"""The trainer gang of a step: asked for, waited for, and sent its batch."""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from workflows import calls
from workflows.messages import ColumnRef, LeaseEvent, LeaseRequest, TrainOutcome
from workflows.scheduling import pipeline
from workflows.step_companions import StepCompanions, settled, without_result

GANG_TRIES = 3


class StepGang(StepCompanions):
    """Who trains the batch."""

    async def acquire(self) -> LeaseEvent:
        """Have the gang: the one the run kept, or a new one from the pool; one that cannot start is tried again."""
        self.set_phase("acquiring")
        nodes = pipeline.train_nodes(self.task.spec)
        await self._ranks_are_up(nodes)
        for attempt in range(GANG_TRIES):
            if self.lease is None:
                await self._request(nodes, attempt)
            await self.until(f"the gang on {', '.join(nodes)}", lambda: self._ready() or bool(self.lost))
            if self.lease is not None and self._ready():
                return self.lease
        raise ApplicationError(
            f"the trainer gang did not start in {GANG_TRIES} tries; the last one said: {self.lost}",
            type="TrainerError",
            non_retryable=True,
        )

    async def prepare(self) -> tuple[LeaseEvent, tuple[ColumnRef, ...]]:
        """The gang, and what models on other nodes say of the batch. Nodes that the update takes from rollout are taken
        when it is said; a gang that never rolls out is had meanwhile."""
        assert self.manifest is not None  # noqa: S101 - set by claim
        if self.task.policy.trainers == "own" or self.lease is not None:
            lease, columns = await asyncio.gather(self.acquire(), self.told_by_companions(self.manifest))
            return lease, columns
        if self.task.spec.algorithm.companions_apart:
            self.set_phase("computing")
        columns = await self.told_by_companions(self.manifest)
        return await self.acquire(), columns

    async def _ranks_are_up(self, nodes: tuple[str, ...]) -> None:
        """Before the first change: ranks that still start are waited for while their nodes roll out."""
        if self.lease is not None or self.task.policy.trainers == "own" or self.task.cost.load:
            return
        probes = [calls.gang_probe(self.task.spec.run, node) for node in nodes]
        await self.until("the ranks to start", lambda: all(probe.done() for probe in probes))
        for probe in probes:
            if (error := probe.exception()) is not None:  # the lease starts them instead
                workflow.logger.warning("resident ranks were not found: %s", calls.reason_of(error))

    async def _request(self, nodes: tuple[str, ...], attempt: int) -> None:
        self.lost = ""
        request = LeaseRequest(
            request_id=f"{workflow.info().workflow_id}/{workflow.uuid4().hex[:8]}/{attempt}",
            run=self.task.spec.run,
            role="trainer",
            tag="train",
            candidates=nodes,
            count=len(nodes),
            priority=pipeline.TRAINER_PRIORITY,
            owner=self.task.owner,
            spec=self.task.spec,
        )
        if not await calls.tell(self.task.pool, "request", request):
            raise ApplicationError(f"{self.task.pool} does not run: start the node agents first", non_retryable=True)
        self.requested, self.requested_at = request.request_id, workflow.now()

    async def train(self, lease: LeaseEvent, columns: tuple[ColumnRef, ...]) -> list[TrainOutcome] | None:
        """Send the batch, and what other models say of it, to every member; None if the gang was lost (``self.lost``
        says why)."""
        self.set_phase("training")
        assert self.manifest is not None  # noqa: S101 - set by _claim
        summary = f"step {self.task.step}"
        handles = calls.on_gang(
            "train_step", self.task, lease, self.manifest, TrainOutcome, summary=summary, columns=columns
        )
        try:
            await self.until("the update", lambda: settled(handles) or bool(self.lost))
            if self.lost and not all(h.done() for h in handles):
                return None
            return [await handle for handle in sorted(handles, key=without_result)]
        except ActivityError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type in calls.STOPS_THE_RUN:
                raise ApplicationError(cause.message, type=cause.type, non_retryable=True) from None
            self.lost = self.lost or calls.reason_of(error)
            return None
        finally:
            calls.call_off(handles)

    def _ready(self) -> bool:
        return self.lease is not None and self.lease.state == "ready"
