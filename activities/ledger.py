"""Activities on the ledger and the object store; they run in the control worker.

Every one is idempotent: it commits its result under a key of its own and a
re-run returns what was committed. Waiting ones heartbeat.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from temporalio import activity

from activities.beat import beating
from activities.claiming import ClaimWait
from activities.layers import policy_for, policy_view
from activities.parts import next_part
from proxy.client import ControlClient
from storage.errors import ConfigError, NotFoundError
from storage.ledger import TRAIN, Checkpoint, Ledger, RewoundStep, evaluated_version
from storage.manifests import Manifest, write_manifest
from storage.metrics import passes
from storage.objects import ObjectStore
from storage.weights import WeightsStore, folder_digest
from workers.agents.data import data_end
from workers.cluster import StateFolder
from workflows.messages import (
    AdmissionInput,
    AdmissionPause,
    AdmissionRate,
    AuditEntry,
    BooksView,
    CheckpointRef,
    ClaimInput,
    ClaimResult,
    CommitInput,
    EndRun,
    EvaluationInput,
    EvaluationOutcome,
    FlowInput,
    FlowView,
    ManifestRef,
    NodeProfiled,
    PartInput,
    PartResult,
    PolicyView,
    RewindInput,
    RunStart,
    StateRef,
    WeightsRef,
)
from workflows.spec import RunSpec

POLL_S = 0.1


class LedgerActivities:
    """Holds the control worker's ledger, object store, client of the proxy and the cluster's state folder."""

    def __init__(self, state: StateFolder, ledger: Ledger, store: ObjectStore, proxy: ControlClient) -> None:
        self._state = state
        self._ledger = ledger
        self._store = store
        self._proxy = proxy

    # Run

    @activity.defn(name="prepare_run")
    async def prepare_run(self, spec: RunSpec) -> RunStart:
        """Open a run, or find where an earlier execution of it stopped: its unfinished claims will be replayed."""
        await beating(self._proxy.create_run(spec.run, spec.model_dump(mode="json"), spec.digest()))
        await asyncio.to_thread(self._ledger.set_run_state, spec.run, "running")
        lineage = (await asyncio.to_thread(self._ledger.run_info, spec.run)).lineage
        if await asyncio.to_thread(self._is_new, spec.run):
            checkpoint = await beating(self._checkpoint(spec.run))
            return RunStart(lineage=lineage, step=0, checkpoint=checkpoint, replay=())
        start = await self.rewind(RewindInput(run=spec.run, from_lineage=lineage))
        return start.model_copy(update={"evaluations": await asyncio.to_thread(self._evaluations, spec)})

    @activity.defn(name="rewind")
    async def rewind(self, task: RewindInput) -> RunStart:
        """Give a lineage up; what it claimed but did not train is replayed in order under the next one."""
        steps = await asyncio.to_thread(self._ledger.rewind, task.run, task.from_lineage)
        checkpoint = await beating(self._checkpoint(task.run))
        return RunStart(
            lineage=task.from_lineage + 1,
            step=checkpoint.version,
            checkpoint=checkpoint,
            replay=tuple(_replay(step) for step in steps if step.manifest_key),
        )

    @activity.defn(name="finish_run")
    async def finish_run(self, task: EndRun) -> BooksView:
        """Samples that no step claimed end as ``filtered(run_ended)``; returns the books."""
        await asyncio.to_thread(self._ledger.end_run, task.run, "run_ended")
        await asyncio.to_thread(self._ledger.set_run_state, task.run, task.state, stopped=True)
        books = await asyncio.to_thread(self._ledger.books, task.run)
        if books.problems:
            activity.logger.error("books of run %s do not balance: %s", task.run, "; ".join(books.problems))
        return BooksView(balanced=books.balanced, produced=books.produced, trained=books.trained)

    @activity.defn(name="record_command")
    async def record_command(self, entry: AuditEntry) -> None:
        """Who commanded what, and why."""
        await asyncio.to_thread(
            self._ledger.audit, entry.actor, entry.what, entry.why, {"run": entry.run, **entry.data}
        )

    @activity.defn(name="save_profile")
    async def save_profile(self, found: NodeProfiled) -> None:
        """Keep a node's device profile; one measured with the same model before is replaced."""
        profile = found.model_dump(mode="json", exclude={"node", "model"})
        await asyncio.to_thread(self._ledger.put_profile, found.node, found.model, profile)

    # Admission

    @activity.defn(name="pipeline_policy")
    async def pipeline_policy(self, spec: RunSpec) -> PolicyView:
        """The fields of the run's pipeline; ``ConfigError`` if the user's own cannot be loaded."""
        return await asyncio.to_thread(policy_view, spec)

    @activity.defn(name="admit_step")
    async def admit_step(self, task: AdmissionInput) -> None:
        """Say what may start while a step is made; groups that ended without entering a batch are replaced."""
        await asyncio.to_thread(self._admit, task)

    @activity.defn(name="group_flow")
    async def group_flow(self, task: FlowInput) -> FlowView:
        """How groups come in, and when nodes that returned to rollout decoded again."""
        return await asyncio.to_thread(self._flow, task)

    @activity.defn(name="pause_admission")
    async def pause_admission(self, task: AdmissionPause) -> None:
        """Start nothing new, or go on; the rest of the admission stays."""
        await asyncio.to_thread(self._change_admission, task.run, task.stream, paused=task.paused)

    @activity.defn(name="set_rate")
    async def set_rate(self, task: AdmissionRate) -> None:
        """Change how many sessions are kept running; the rest of the admission stays."""
        await asyncio.to_thread(self._change_admission, task.run, task.stream, target_in_flight=task.target_in_flight)

    # Batches

    @activity.defn(name="claim_batch")
    async def claim_batch(self, task: ClaimInput) -> ClaimResult:
        """Wait until enough groups are complete (or the time limit), claim them and write the manifest."""
        end = await asyncio.to_thread(data_end, task.spec)
        since = activity.info().scheduled_time.timestamp() if task.since is None else task.since
        waiter = ClaimWait(self._ledger, task, since, end)
        found = await beating(waiter.wait())
        claim = found.batch
        manifest = Manifest.of(claim, task.spec.sampling.temperature)
        ref = await beating(asyncio.to_thread(write_manifest, self._store, manifest))
        await asyncio.to_thread(self._ledger.set_manifest, task.spec.run, task.lineage, task.step, ref.key, ref.digest)
        return ClaimResult(
            manifest=ManifestRef(step=task.step, key=ref.key, digest=ref.digest),
            groups=len(claim.groups),
            zero_variance=claim.zero_variance,
            stale=claim.stale,
            reward_mean=claim.reward_mean,
            reward_std=claim.reward_std,
            waited_s=round(waiter.waited_s, 3),
            pending=found.pending,
            why=found.why,
            switch=found.switch,
            length_bias=found.length_bias,
            age_bias=found.age_bias,
        )

    @activity.defn(name="next_part")
    async def next_part(self, task: PartInput) -> PartResult:
        """Wait until some groups of a step are complete ahead of their batch, and write a manifest of them."""
        part = await beating(next_part(self._ledger, task))
        ref = await beating(asyncio.to_thread(write_manifest, self._store, part))
        manifest = ManifestRef(step=task.step, key=ref.key, digest=ref.digest)
        return PartResult(manifest=manifest, ordinals=tuple(group.ordinal for group in part.groups))

    @activity.defn(name="commit_step")
    async def commit_step(self, task: CommitInput) -> CheckpointRef:
        """Commit the checkpoint: its claimed samples become trained in that transaction; then the step's figures."""
        await asyncio.to_thread(self._commit, task)
        weights = WeightsStore(self._state.weights(task.run))
        removed = await beating(asyncio.to_thread(weights.collect, task.keep_weights, every=task.keep_weights_every))
        activity.logger.info("version %d is committed; %d old ones removed", task.checkpoint.version, len(removed))
        return task.checkpoint

    # Weights

    @activity.defn(name="latest_checkpoint")
    async def latest_checkpoint(self, run: str) -> CheckpointRef:
        """The newest committed checkpoint, or the initial model."""
        return await self._checkpoint(run)

    @activity.defn(name="latest_weights")
    async def latest_weights(self, run: str) -> WeightsRef:
        """The newest committed weights, or the initial model's."""
        return (await self._checkpoint(run)).weights

    # Evaluation

    @activity.defn(name="open_evaluation")
    async def open_evaluation(self, task: EvaluationInput) -> int:
        """Admit every held-out task to the stream ``eval/<version>``; returns how many there are."""
        path = task.spec.data.held_out
        if path is None:
            raise ConfigError("data.held_out is not set: there is nothing to evaluate on")
        count = await asyncio.to_thread(_count_tasks, Path(path))
        await asyncio.to_thread(
            self._ledger.set_admission,
            task.run,
            f"eval/{task.version}",
            admit_until=count,
            target_in_flight=task.spec.pipeline.target_in_flight,
            samples_per_task=task.spec.evaluation.samples,
            per_route=task.spec.engine.max_running,
        )
        return count

    @activity.defn(name="wait_evaluation")
    async def wait_evaluation(self, task: EvaluationInput) -> EvaluationOutcome:
        """Wait until every held-out sample has ended; the mean of their rewards."""
        return await beating(self._evaluated(task.spec, task.version))

    # Mechanics

    async def _evaluated(self, spec: RunSpec, version: int) -> EvaluationOutcome:
        while True:
            outcome = await asyncio.to_thread(self._outcome, spec, version)
            if outcome is not None:
                return outcome
            await asyncio.sleep(POLL_S)

    def _outcome(self, spec: RunSpec, version: int) -> EvaluationOutcome | None:
        result = self._ledger.finish_evaluation(spec.run, f"eval/{version}")
        if result is None:
            return None
        return EvaluationOutcome(
            version=version,
            mean=result.mean,
            samples=result.n,
            failed=result.failed,
            pass_at=passes(spec.evaluation.pass_at, result.rewards, spec.evaluation.pass_reward),
        )

    def _evaluations(self, spec: RunSpec) -> tuple[EvaluationOutcome, ...]:
        """Those an earlier execution of the run has ended, by version."""
        versions = (evaluated_version(stream) for stream in self._ledger.streams(spec.run))
        found = (self._outcome(spec, version) for version in sorted(v for v in versions if v is not None))
        return tuple(outcome for outcome in found if outcome is not None)

    async def _checkpoint(self, run: str) -> CheckpointRef:
        found = await asyncio.to_thread(self._ledger.latest_checkpoint, run)
        if found is not None:
            return _checkpoint_ref(found)
        info = await asyncio.to_thread(self._ledger.run_info, run)
        model = str(RunSpec.model_validate(info.spec).model.path)
        digest = await asyncio.to_thread(_initial_digest, model)
        weights = WeightsRef(version=0, path=model, digest=digest)
        return CheckpointRef(lineage=info.lineage, step=-1, version=0, path=None, digest="", weights=weights)

    def _is_new(self, run: str) -> bool:
        books = self._ledger.books(run)
        return books.produced == 0 and self._ledger.latest_checkpoint(run) is None

    def _admit(self, task: AdmissionInput) -> None:
        spec, end = task.spec, data_end(task.spec)
        rule, ended = policy_for(spec), self._ended(spec)
        until = rule.admit_until(task.step, ended=ended)
        self._ledger.set_admission(
            spec.run,
            TRAIN,
            admit_until=until if end is None else min(until, end),
            target_in_flight=spec.pipeline.target_in_flight,
            samples_per_task=spec.algorithm.group_size,
            paused=task.paused,
            per_route=spec.engine.max_running,
            fresh_from=rule.admit_until(task.step - 1, ended=ended) if task.step else None,
            fresh_version=task.step,
        )

    def _flow(self, task: FlowInput) -> FlowView:
        rule = policy_for(task.spec)
        flow = self._ledger.flow(task.spec.run, min_version=rule.min_version(task.step))
        began = [
            interval.start
            for interval in self._ledger.intervals(task.spec.run)
            if interval.kind == "generate" and interval.node in task.nodes and interval.start >= task.since
        ]
        return FlowView(**flow._asdict(), wanted=rule.groups_per_step, decoding=min(began, default=None))

    def _ended(self, spec: RunSpec) -> int:
        try:
            return self._ledger.ended_groups(spec.run, refill=spec.pipeline.refill)
        except NotFoundError:  # the stream does not exist yet
            return 0

    def _change_admission(
        self, run: str, stream: str, *, paused: bool | None = None, target_in_flight: int | None = None
    ) -> None:
        try:
            self._ledger.change_admission(run, stream, paused=paused, target_in_flight=target_in_flight)
        except NotFoundError:  # nothing was admitted yet; the first step brings the new values
            return

    def _commit(self, task: CommitInput) -> None:
        checkpoint = task.checkpoint
        self._ledger.commit_checkpoint(
            task.run,
            task.lineage,
            task.step,
            version=checkpoint.version,
            path=checkpoint.path or "",
            digest=checkpoint.digest,
            weights_path=checkpoint.weights.path,
            weights_digest=checkpoint.weights.digest,
            critic_path=checkpoint.critic.path if checkpoint.critic else None,
            critic_digest=checkpoint.critic.digest if checkpoint.critic else None,
            metrics=task.metrics,
            dropped=task.dropped,
        )
        self._ledger.record_step(task.run, task.lineage, task.step, task.metrics)
        known = {(i.node, i.kind, i.start) for i in self._ledger.intervals(task.run)}
        for interval in task.intervals:
            if (interval.node, interval.kind, interval.start) not in known:
                self._ledger.record_interval(task.run, interval.node, interval.kind, interval.start, interval.end)


@functools.cache
def _initial_digest(model: str) -> str:
    """Digest of the initial model; a model directory does not change while a control worker lives."""
    return folder_digest(Path(model))


def _checkpoint_ref(found: Checkpoint) -> CheckpointRef:
    weights = WeightsRef(version=found.version, path=found.weights_path, digest=found.weights_digest)
    return CheckpointRef(
        lineage=found.lineage,
        step=found.step,
        version=found.version,
        path=found.path,
        digest=found.digest,
        weights=weights,
        critic=StateRef(path=found.critic_path, digest=found.critic_digest or "") if found.critic_path else None,
    )


def _replay(step: RewoundStep) -> ManifestRef:
    return ManifestRef(step=step.step, key=step.manifest_key or "", digest=step.digest or "")


def _count_tasks(path: Path) -> int:
    try:
        with path.open() as lines:
            count = sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"data.held_out {path} cannot be read: {error.strerror}") from None
    if count == 0:
        raise ConfigError(f"data.held_out {path} has no tasks: remove it from the run file or fill it")
    return count
