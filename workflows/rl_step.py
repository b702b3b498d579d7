"""``RlStep``: one policy update, from a claimed batch to a committed checkpoint.

claiming -> computing (by models that have nodes of their own) and acquiring
(the pool pre-empts train nodes, or the run has kept the gang) -> training,
then the critic where it is apart -> committing. The manifest's digest is in history before
anything is trained. The gang's lease is the run's, which tells the step about
it and decides after the step whether the nodes return to rollout.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows import calls
from workflows.messages import (
    CheckpointRef,
    ClaimResult,
    ColumnRef,
    CommitInput,
    LeaseEvent,
    StateRef,
    StepInput,
    StepResult,
    TrainInterval,
    TrainOutcome,
)
from workflows.step_base import StepStopped
from workflows.step_batch import StepBatch

SPARE_VERSIONS = 3
"""Published versions kept beyond the staleness limit: an engine that is slow to sync may still fall back to one."""


@workflow.defn(name="RlStep", failure_exception_types=[Exception])
class RlStep(StepBatch):
    """See the module. Id ``run/<run>/step/<lineage>.<n>``; 10 to 30 activities at most."""

    @workflow.init
    def __init__(self, task: StepInput) -> None:
        super().__init__(task)

    @workflow.run
    async def run(self, task: StepInput) -> StepResult:
        started = workflow.now()
        try:
            await self.admit()
            ahead = asyncio.create_task(self.work_ahead()) if task.policy.accumulates else None
            try:
                claim = await self.claim()
            finally:
                self.head_start.end()
            if ahead is not None:
                await ahead
            if claim is None and self.manifest is None:
                return StepResult(outcome="data_ended", step=task.step, reason="nothing is left to train on")
            claimed = workflow.now()
            lease, columns = await self.prepare()
            acquired = workflow.now()
            outcomes = await self.train(lease, columns)
            critic = await self._critic(outcomes, columns)
        except StepStopped:
            return StepResult(outcome="stopped", step=task.step, reason="stopped at once")
        taken = claim.switch if claim is not None and self.granted_at is not None else None
        facts = {"taken": taken, "claimed_at": claimed.timestamp() if claim is not None else None}
        if self.granted_at is not None:
            facts["release_s"] = (self.granted_at - (self.requested_at or claimed)).total_seconds()
            facts["load_s"] = ((self.ready_at or acquired) - self.granted_at).total_seconds()
        facts |= self._effort(lease, outcomes or [], started, acquired)
        facts["rollout_s"] = (claimed - started).total_seconds()
        result = StepResult.model_validate({"outcome": "gang_lost", "step": task.step, "reason": self.lost, **facts})
        if outcomes is None:
            return result
        waits = {
            "seconds_claim": (claimed - started).total_seconds(),
            "seconds_acquire": (acquired - claimed).total_seconds(),
            "seconds_step_training": (workflow.now() - acquired).total_seconds(),
        }
        if self.told_at is not None:
            waits["seconds_companions"] = (self.told_at - claimed).total_seconds()
        checkpoint, metrics = await self._commit(outcomes, critic, {**_figures(claim), **waits})
        trained = {"outcome": "trained", "checkpoint": checkpoint, "metrics": metrics, "reason": ""}
        return result.model_copy(update=trained)

    def _effort(
        self, lease: LeaseEvent, outcomes: list[TrainOutcome], started: datetime, acquired: datetime
    ) -> dict[str, float | None]:
        """How long the gang computed and, where it accumulated, how long it waited for groups meanwhile."""
        node = lease.members[0]
        ahead = sum(i.end - i.start for i in self.head_start.busy if i.node == node)
        update = sum(o.end - o.start for o in outcomes if o.node == node)
        effort: dict[str, float | None] = {"trained_s": ahead + update}
        kept = self.granted_at is None
        since = started if kept else self.ready_at
        if self.task.policy.accumulates and since is not None:
            waited = (acquired - since).total_seconds() - ahead
            effort |= {"waited_s": max(0.0, waited), "called": not kept}
        return effort

    async def _critic(self, outcomes: list[TrainOutcome] | None, columns: tuple[ColumnRef, ...]) -> TrainOutcome | None:
        """What became of a critic apart, which learns what the policy's update found."""
        leader = next((o for o in outcomes or [] if o.checkpoint), None)
        return (
            None
            if leader is None or self.manifest is None
            else await self.critic_learns(self.manifest, columns, leader)
        )

    async def _commit(
        self, outcomes: list[TrainOutcome], critic: TrainOutcome | None, figures: dict[str, float]
    ) -> tuple[CheckpointRef, dict[str, float]]:
        """Commit the checkpoint in the ledger, before any engine hears of its weights."""
        self.set_phase("committing")
        checkpoint = next((o.checkpoint for o in outcomes if o.checkpoint), None)
        if checkpoint is None:
            raise ApplicationError("no member of the gang has rank 0: no checkpoint was reported", non_retryable=True)
        metrics = {**figures, **next(o.metrics for o in outcomes if o.checkpoint)}
        if critic is not None and critic.checkpoint is not None:
            state = critic.checkpoint
            checkpoint = checkpoint.model_copy(update={"critic": StateRef(path=state.path or "", digest=state.digest)})
            metrics |= {"value_loss": critic.metrics["value_loss"], "seconds_critic": critic.end - critic.start}
        commit = CommitInput(
            run=self.task.spec.run,
            lineage=self.task.lineage,
            step=self.task.step,
            checkpoint=checkpoint,
            metrics=metrics,
            dropped=next(o.dropped for o in outcomes if o.checkpoint),
            intervals=(
                *self.head_start.busy,
                *(TrainInterval(node=o.node, start=o.start, end=o.end) for o in outcomes),
                *self.companions_busy,
            ),
            keep_weights=self.task.policy.staleness + SPARE_VERSIONS,
        )
        committed = await calls.on_control(
            "commit_step", commit, CheckpointRef, summary=f"commit version {checkpoint.version}"
        )
        self.set_phase("done")
        return committed, metrics


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
