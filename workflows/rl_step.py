"""``RlStep``: one policy update, from a claimed batch to a committed checkpoint.

claiming -> acquiring (the pool pre-empts train nodes) -> training ->
committing. The manifest's digest is in history before anything is trained.
Rollout goes on meanwhile on every node the gang did not take.
"""

from __future__ import annotations

from collections.abc import Callable

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.workflow import ActivityHandle

from workflows import calls
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
    Stop,
    TrainInterval,
    TrainOutcome,
    TrainTask,
    WithdrawRequest,
)
from workflows.queues import node_queue
from workflows.scheduling import pipeline

GANG_TRIES = 3
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
        self.lease: LeaseEvent | None = None
        self.lost = ""
        self.queue_notice = ""

    # Messages

    @workflow.signal(description='Claim nothing while paused: {"paused": true}')
    def pause(self, order: StepPause) -> None:
        self.paused = order.paused

    @workflow.signal(description='End the step at once, sent by the run: {"mode": "now"}')
    def stop(self, order: Stop) -> None:
        self.stopping = True

    @workflow.signal(description="Sent by the pool: the trainer lease exists.")
    def granted(self, event: LeaseEvent) -> None:
        if self.lease is None or event.epoch > self.lease.epoch:  # it may come after the lease's own report
            self.lease, self.lost = event, ""

    @workflow.signal(description="Sent by the trainer lease: its gang is ready.")
    def lease_report(self, event: LeaseEvent) -> None:
        if self.lease is None or event.epoch >= self.lease.epoch:
            self.lease, self.lost = event, ""

    @workflow.signal(description="Sent by the trainer lease: it was revoked and its gang is parked.")
    def revoked(self, event: LeaseEvent) -> None:
        if self.phase == "acquiring":  # later, the update has ended before the gang parked
            self._lease_over(event)

    @workflow.signal(description="Sent by the trainer lease: a rank or a node is lost.")
    def lease_lost(self, event: LeaseEvent) -> None:
        self._lease_over(event)

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
            claim = await self._claim()
            claimed = workflow.now()
            lease = await self._acquire()
            acquired = workflow.now()
            outcomes = await self._train(lease)
        except _Stopped:
            return StepResult(outcome="stopped", step=task.step, reason="stopped at once")
        if outcomes is None:
            return StepResult(outcome="gang_lost", step=task.step, reason=self.lost)
        waits = {
            "seconds_claim": (claimed - started).total_seconds(),
            "seconds_acquire": (acquired - claimed).total_seconds(),
            "seconds_step_training": (workflow.now() - acquired).total_seconds(),
        }
        return await self._commit(outcomes, {**_figures(claim), **waits})

    async def _admit(self) -> None:
        spec = self.task.spec
        self._set_phase("claiming")
        admission = AdmissionInput(
            run=spec.run,
            stream="train",
            admit_until=pipeline.policy_of(spec).admit_until(self.task.step),
            target_in_flight=spec.pipeline.target_in_flight,
            samples_per_task=spec.algorithm.group_size,
            paused=self.paused,
        )
        await calls.locally("set_admission", admission, type(None), summary=f"admit for step {self.task.step}")

    async def _claim(self) -> ClaimResult | None:
        """Claim a batch, or take the one to be replayed. A pause takes the waiting claim back."""
        while self.manifest is None:
            await self._until("the end of the pause", lambda: not self.paused)
            claim = ClaimInput(
                spec=self.task.spec, lineage=self.task.lineage, step=self.task.step, version=self.task.version
            )
            handle = calls.on_control(
                "claim_batch", claim, ClaimResult, limit=calls.FOREVER, summary=f"batch of step {self.task.step}"
            )
            try:
                await self._until("enough complete groups", self._claimed_or_paused(handle))
            finally:
                if not handle.done():
                    handle.cancel()
            if handle.done():
                result = await handle
                self.manifest = result.manifest
                return result
        return None

    async def _acquire(self) -> LeaseEvent:
        """Ask the pool for the gang until it is ready; a gang that cannot start is tried again a few times."""
        self._set_phase("acquiring")
        spec = self.task.spec
        nodes = pipeline.train_nodes(spec)
        for attempt in range(GANG_TRIES):
            self.lease, self.lost = None, ""
            request_id = f"{workflow.info().workflow_id}/{workflow.info().run_id[:8]}/{attempt}"
            request = LeaseRequest(
                request_id=request_id,
                run=spec.run,
                role="trainer",
                tag="train",
                candidates=nodes,
                count=len(nodes),
                priority=pipeline.TRAINER_PRIORITY,
                owner=workflow.info().workflow_id,
                spec=spec,
            )
            if not await calls.tell(self.task.pool, "request", request):
                raise ApplicationError(
                    f"{self.task.pool} does not run: start the node agents first", non_retryable=True
                )
            try:
                await self._until(f"the gang on {', '.join(nodes)}", lambda: self._ready() or bool(self.lost))
            except _Stopped:
                await calls.tell(
                    self.task.pool, "withdraw", WithdrawRequest(request_id=request_id, reason="step stopped")
                )
                raise
            if self.lease is not None and self._ready():
                return self.lease
        raise ApplicationError(
            f"the trainer gang did not start in {GANG_TRIES} tries; the last one said: {self.lost}",
            type="TrainerError",
            non_retryable=True,
        )

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
            outcomes = [await handle for handle in handles]
        except ActivityError as error:
            self.lost = self.lost or calls.reason_of(error)
            return None
        finally:
            for handle in handles:
                if not handle.done():
                    handle.cancel()
            if self.lost or self.stopping:
                await self._let_go(lease, self.lost or "the run stops")
        return outcomes

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

    async def _commit(self, outcomes: list[TrainOutcome], figures: dict[str, float]) -> StepResult:
        """Commit the checkpoint in the ledger, before any engine hears of its weights; then give the nodes back."""
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
            intervals=tuple(TrainInterval(node=o.node, start=o.start, end=o.end) for o in outcomes),
            keep_weights=pipeline.policy_of(self.task.spec).staleness + SPARE_VERSIONS,
        )
        committed = await calls.on_control(
            "commit_step", commit, CheckpointRef, summary=f"commit version {checkpoint.version}"
        )
        if self.lease is not None:
            await self._let_go(self.lease, f"step {self.task.step} is trained")
        self._set_phase("done")
        return StepResult(outcome="trained", step=self.task.step, checkpoint=committed, metrics=metrics)

    async def _let_go(self, lease: LeaseEvent, reason: str) -> None:
        await calls.tell(calls.lease_id(lease.lease, lease.epoch), "revoke", Revoke(reason=reason))

    # Helpers

    def _claimed_or_paused(self, handle: ActivityHandle[ClaimResult]) -> Callable[[], bool]:
        return lambda: handle.done() or self.paused

    def _ready(self) -> bool:
        return self.lease is not None and self.lease.state == "ready"

    def _lease_over(self, event: LeaseEvent) -> None:
        if self.lease is not None and event.epoch == self.lease.epoch:
            self.lost = event.reason or event.state

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """A named wait that a stop ends."""
        self.waiting_for = what
        self._show()
        await workflow.wait_condition(lambda: self.stopping or condition())
        self.waiting_for = ""
        if self.stopping and not condition():
            raise _Stopped

    def _waiting(self) -> str:
        return (
            f"{self.waiting_for} ({self.queue_notice})" if self.waiting_for and self.queue_notice else self.waiting_for
        )

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
    if claim.reward_mean is not None:
        figures["reward_mean"] = claim.reward_mean
    if claim.reward_std is not None:
        figures["reward_std"] = claim.reward_std
    return figures
