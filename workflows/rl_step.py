"""``RlStep``: one policy update, from a claimed batch to a committed checkpoint.

claiming -> acquiring (the pool pre-empts train nodes, or the run has kept
the gang) -> training -> committing. The manifest's digest is in history before
anything is trained. The gang's lease is the run's, which tells the step about
it and decides after the step whether the nodes return to rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityHandle

from workflows import calls
from workflows.head_start import HeadStart
from workflows.markdown import link, page
from workflows.messages import (
    AdmissionInput,
    CheckpointRef,
    ClaimInput,
    ClaimResult,
    CommitInput,
    LeaseEvent,
    LeaseRequest,
    ManifestRef,
    QueueNotice,
    Revoke,
    StepInput,
    StepPause,
    StepResult,
    StepStatus,
    StepUpdating,
    Stop,
    TrainInterval,
    TrainOutcome,
    TrainTask,
    WithdrawRequest,
)
from workflows.queues import node_queue
from workflows.scheduling import pipeline

GANG_TRIES = 3
END_OF_DATA = "EndOfData"
LEAST_PATIENCE_S = 1.0
SPARE_VERSIONS = 3
"""Published versions kept beyond the staleness limit: an engine that is slow to sync may still fall back to one."""


class _Stopped(Exception):
    """The run told the step to stop at once."""


@workflow.defn(name="RlStep", failure_exception_types=[Exception])
class RlStep:
    """See the module. Id ``run/<run>/step/<lineage>.<n>``; 10 to 30 activities at most."""

    @workflow.init
    def __init__(self, task: StepInput) -> None:
        self.task = task
        self.phase = "claiming"
        self.waiting_for = ""
        self.paused = task.paused
        self.stopping = False
        self.manifest = task.replay
        self.lease = task.gang
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
        self._show()

    @workflow.query(description="Phase, manifest, lease and what the step waits for.")
    def status(self) -> StepStatus:
        return StepStatus(
            lineage=self.task.lineage,
            step=self.task.step,
            phase=self.phase,
            waiting_for=self._waiting(),
            manifest=self.manifest,
            lease=f"{self.lease.lease}/{self.lease.epoch}" if self.lease else None,
        )

    # Life

    @workflow.run
    async def run(self, task: StepInput) -> StepResult:
        started = workflow.now()
        try:
            await self._admit()
            ahead = asyncio.create_task(self._work_ahead()) if task.policy.accumulates else None
            try:
                claim = await self._claim()
            finally:
                self.head_start.end()
            if ahead is not None:
                await ahead
            if claim is None and self.manifest is None:
                return StepResult(outcome="data_ended", step=task.step, reason="nothing is left to train on")
            claimed = workflow.now()
            lease = await self._acquire()
            acquired = workflow.now()
            outcomes = await self._train(lease)
        except _Stopped:
            return StepResult(outcome="stopped", step=task.step, reason="stopped at once")
        taken = claim.switch if claim is not None and self.granted_at is not None else None
        facts = {"taken": taken, "claimed_at": claimed.timestamp() if claim is not None else None}
        if self.granted_at is not None:
            facts["release_s"] = (self.granted_at - (self.requested_at or claimed)).total_seconds()
            facts["load_s"] = ((self.ready_at or acquired) - self.granted_at).total_seconds()
        facts |= self._effort(lease, outcomes or [], acquired)
        result = StepResult.model_validate({"outcome": "gang_lost", "step": task.step, "reason": self.lost, **facts})
        if outcomes is None:
            return result
        waits = {
            "seconds_claim": (claimed - started).total_seconds(),
            "seconds_acquire": (acquired - claimed).total_seconds(),
            "seconds_step_training": (workflow.now() - acquired).total_seconds(),
        }
        checkpoint, metrics = await self._commit(outcomes, {**_figures(claim), **waits})
        trained = {"outcome": "trained", "checkpoint": checkpoint, "metrics": metrics, "reason": ""}
        return result.model_copy(update=trained)

    def _effort(self, lease: LeaseEvent, outcomes: list[TrainOutcome], acquired: datetime) -> dict[str, float | None]:
        """How long the gang computed and, if it was called from rollout to accumulate, how long it waited meanwhile."""
        node = lease.members[0]
        ahead = sum(i.end - i.start for i in self.head_start.busy if i.node == node)
        update = sum(o.end - o.start for o in outcomes if o.node == node)
        called = self.task.policy.accumulates and self.granted_at is not None and self.ready_at is not None
        waited = (acquired - self.ready_at).total_seconds() - ahead if called and self.ready_at else None
        return {"trained_s": ahead + update, "waited_s": None if waited is None else max(0.0, waited)}

    async def _admit(self) -> None:
        self._set_phase("claiming")
        admission = AdmissionInput(spec=self.task.spec, step=self.task.step, paused=self.paused)
        await calls.locally("admit_step", admission, type(None), summary=f"admit for step {self.task.step}")

    async def _work_ahead(self) -> None:
        """Have the gang, called from rollout where enough groups are complete, and let it accumulate groups as they
        are; a stop is for the main line to see."""
        part = None
        try:
            if self.lease is None and self.task.recall:
                part = await self.head_start.next_part(self.task.recall)
                if part is None:
                    return
                await self._until("the end of the pause", lambda: not self.paused or self.manifest is not None)
            lease = await self._acquire()
        except _Stopped:
            return
        self._set_phase("claiming")
        if self.manifest is None:
            await self.head_start.run(lease, part)

    async def _claim(self) -> ClaimResult | None:
        """Claim a batch, or take the one to be replayed. A pause takes the waiting claim back."""
        since = workflow.now().timestamp()
        while self.manifest is None:
            await self._until("the end of the pause", lambda: not self.paused)
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
                await self._until("enough complete groups", self._claim_settled(handle))
            finally:
                if not handle.done():
                    handle.cancel()
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

    async def _acquire(self) -> LeaseEvent:
        """Have the gang: the one the run kept, or a new one from the pool; one that cannot start is tried again."""
        self._set_phase("acquiring")
        nodes = pipeline.train_nodes(self.task.spec)
        await self._ranks_are_up(nodes)
        for attempt in range(GANG_TRIES):
            if self.lease is None:
                await self._request(nodes, attempt)
            await self._until(f"the gang on {', '.join(nodes)}", lambda: self._ready() or bool(self.lost))
            if self.lease is not None and self._ready():
                return self.lease
        raise ApplicationError(
            f"the trainer gang did not start in {GANG_TRIES} tries; the last one said: {self.lost}",
            type="TrainerError",
            non_retryable=True,
        )

    async def _ranks_are_up(self, nodes: tuple[str, ...]) -> None:
        """Before the first change: ranks that still start are waited for while their nodes roll out."""
        if self.lease is not None or self.task.policy.trainers == "own" or self.task.cost.load:
            return
        probes = [calls.gang_probe(self.task.spec.run, node) for node in nodes]
        await self._until("the ranks to start", lambda: all(probe.done() for probe in probes))
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

    async def _train(self, lease: LeaseEvent) -> list[TrainOutcome] | None:
        """Send the batch to every member; None if the gang was lost (``self.lost`` says why)."""
        self._set_phase("training")
        assert self.manifest is not None  # noqa: S101 - set by _claim
        limit = self.task.spec.trainer.step_time_limit_s
        handles = [self._train_on(node, lease, self.manifest, limit) for node in lease.members]
        try:
            await self._until("the update", lambda: _settled(handles) or bool(self.lost))
            if self.lost and not all(h.done() for h in handles):
                return None
            return [await handle for handle in handles]
        except ActivityError as error:
            self.lost = self.lost or calls.reason_of(error)
            return None
        finally:
            for handle in handles:
                if not handle.done():
                    handle.cancel()

    def _train_on(
        self, node: str, lease: LeaseEvent, manifest: ManifestRef, limit: float
    ) -> ActivityHandle[TrainOutcome]:
        train = TrainTask(
            run=self.task.spec.run,
            lease=lease.lease,
            epoch=lease.epoch,
            node=node,
            gang=lease.gang or "",
            lineage=self.task.lineage,
            manifest=manifest,
            time_limit_s=limit,
        )
        return calls.on_node(
            "train_step",
            train,
            TrainOutcome,
            queue=node_queue(node),
            limit_s=limit + 60,
            summary=f"step {self.task.step} on {node}",
        )

    async def _commit(
        self, outcomes: list[TrainOutcome], figures: dict[str, float]
    ) -> tuple[CheckpointRef, dict[str, float]]:
        """Commit the checkpoint in the ledger, before any engine hears of its weights."""
        self._set_phase("committing")
        checkpoint = next((o.checkpoint for o in outcomes if o.checkpoint), None)
        if checkpoint is None:
            raise ApplicationError("no member of the gang has rank 0: no checkpoint was reported", non_retryable=True)
        metrics = {**figures, **next(o.metrics for o in outcomes if o.checkpoint)}
        commit = CommitInput(
            run=self.task.spec.run,
            lineage=self.task.lineage,
            step=self.task.step,
            checkpoint=checkpoint,
            metrics=metrics,
            intervals=(
                *self.head_start.busy,
                *(TrainInterval(node=o.node, start=o.start, end=o.end) for o in outcomes),
            ),
            keep_weights=self.task.policy.staleness + SPARE_VERSIONS,
        )
        committed = await calls.on_control(
            "commit_step", commit, CheckpointRef, summary=f"commit version {checkpoint.version}"
        )
        self._set_phase("done")
        return committed, metrics

    # Helpers

    def _claim_settled(self, handle: ActivityHandle[ClaimResult]) -> Callable[[], bool]:
        """Claimed; or to be asked for anew, because of a pause or of further groups that it must hold."""
        return lambda: handle.done() or self.paused or self.preferred != self.head_start.taken

    def _ready(self) -> bool:
        return self.lease is not None and self.lease.state == "ready"

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """A named wait that a stop ends."""
        self.waiting_for = what
        self._show()
        await workflow.wait_condition(lambda: self.stopping or condition())
        self.waiting_for = ""
        if self.stopping and not condition():
            await self._take_back_request()
            raise _Stopped

    def _waiting(self) -> str:
        return (
            f"{self.waiting_for} ({self.queue_notice})" if self.waiting_for and self.queue_notice else self.waiting_for
        )

    async def _take_back_request(self) -> None:
        if self.requested and self.lease is None:
            order = WithdrawRequest(request_id=self.requested, reason="the step was stopped")
            await calls.tell(self.task.pool, "withdraw", order)

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        workflow.upsert_search_attributes(
            [
                calls.SF_RUN.value_set(self.task.spec.run),
                calls.SF_STEP.value_set(self.task.step),
                calls.SF_PHASE.value_set(phase),
            ]
        )
        self._show()

    def _show(self) -> None:
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


def _settled(handles: list[ActivityHandle[TrainOutcome]]) -> bool:
    """All members are done, or one has failed."""
    return all(h.done() for h in handles) or any(h.done() and h.exception() is not None for h in handles)


def _figures(claim: ClaimResult | None) -> dict[str, float]:
    """Metrics of the batch; none for a replay, whose batch was counted when it was claimed."""
    if claim is None:
        return {"replayed": 1.0}
    figures = {
        "groups_claimed": float(claim.groups),
        "groups_zero_variance": float(claim.zero_variance),
        "groups_stale": float(claim.stale),
    }
    for name in ("reward_mean", "reward_std", "length_bias", "age_bias"):
        if (value := getattr(claim, name)) is not None:
            figures[name] = value
    return figures
