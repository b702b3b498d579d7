"""``TrainingRun``: one training job; the input is its run file as JSON.

The main loop makes steps; a second loop (:meth:`TrainingRun._reconcile`)
brings engines to the newest weights and carries out pause and resume while a
step is in work. Handlers only change state. The run's position is a ledger
fact, so a run that was terminated goes on where it was when it is started
again under the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    WorkflowAlreadyStartedError,
)
from temporalio.workflow import ActivityHandle, ParentClosePolicy

from workflows import calls
from workflows.alarms import alarms
from workflows.messages import (
    AdmissionPause,
    AuditEntry,
    BooksView,
    CheckpointRef,
    Command,
    DataInput,
    EndRun,
    EngineView,
    EvaluationInput,
    EvaluationOutcome,
    GangView,
    HoldLease,
    LeaseEvent,
    LeaseRequest,
    NodeRun,
    Pause,
    QueueNotice,
    RewindInput,
    RunInput,
    RunResult,
    RunStart,
    RunState,
    RunStatus,
    SetParams,
    StepInput,
    StepPause,
    StepResult,
    Stop,
    StreamRate,
    Wake,
    WithdrawRequest,
)
from workflows.queues import nodectl_queue
from workflows.run_page import ENDED, RunView, run_page
from workflows.scheduling import pipeline
from workflows.scheduling.gang import plan_gang
from workflows.spec import RunSpec
from workflows.trainer_lease import trainer_task

ENGINE_LIMIT = timedelta(minutes=15)
SYNC_SLACK = timedelta(minutes=5)
"""Beyond what one engine may take to load: after it, those that did not are out of service and not waited for."""
END_LIMIT = timedelta(seconds=60)
DATA_CLOSES = timedelta(seconds=1)
MAX_LOSSES = 5
POOL_TRIES = 30
POOL_PAUSE = timedelta(seconds=1)
CHANGEABLE = {
    "pipeline": frozenset({"steps", "max_staleness", "target_in_flight", "batch_time_limit_s"}),
    "evaluation": frozenset({"every"}),
}


@workflow.defn(name="TrainingRun", failure_exception_types=[Exception])
class TrainingRun:
    """See the module. Id ``run/<run>``."""

    @workflow.init
    def __init__(self, given: RunInput) -> None:
        self.spec = given.run_file()
        self.state = given.carried or RunState()
        self.waiting_for = ""
        self.pool = calls.pool_id(self.spec.cluster)
        self.step_running: str | None = None
        self.dirty = True
        self.reconciling = False
        self.commands: list[AuditEntry] = []
        self.fatal = ""
        self.data_stopped = False
        self.warming: list[ActivityHandle[None]] = []

    # Commands

    @workflow.update(
        description='Pause: {"mode": "drain"} lets sessions end, {"mode": "now"} cuts them; '
        '"give_back": true frees the nodes'
    )
    async def pause(self, order: Pause) -> RunStatus:
        self.state.paused = order
        self._command("pause", order.actor, order.why, {"mode": order.mode, "give_back": order.give_back})
        return self.status()

    @pause.validator
    def _check_pause(self, order: Pause) -> None:
        self._must_run()

    @workflow.update(description='Go on after a pause: {"actor": "ann", "why": "GPU is back"}')
    async def resume(self, order: Command) -> RunStatus:
        self.state.paused = None
        self._command("resume", order.actor, order.why, {})
        return self.status()

    @resume.validator
    def _check_resume(self, order: Command) -> None:
        self._must_run()
        if self.state.paused is None:
            raise ApplicationError(f"run {self.spec.run} is not paused")

    @workflow.update(
        description='The newest checkpoint; waits for the update in work, if there is one: {"actor": "ann"}'
    )
    async def checkpoint_now(self, order: Command) -> CheckpointRef:
        step = self.state.step
        self._command("checkpoint_now", order.actor, order.why, {})
        await workflow.wait_condition(lambda: self.state.phase != "training" or self.state.step != step)
        if self.state.checkpoint is None:
            raise ApplicationError(f"run {self.spec.run} has no checkpoint yet: it is {self.state.phase}")
        return self.state.checkpoint

    @workflow.update(
        description='Change values of a running job: {"patch": {"pipeline": {"steps": 40, "target_in_flight": 32}}}'
    )
    async def set_params(self, order: SetParams) -> RunStatus:
        self.spec = self._patched(order)
        self._command("set_params", order.actor, order.why, dict(order.patch))
        return self.status()

    @set_params.validator
    def _check_params(self, order: SetParams) -> None:
        self._must_run()
        self._patched(order)

    @workflow.update(
        description='End the run: {"mode": "drain"} after the current step and an evaluation, "now" at once'
    )
    async def stop(self, order: Stop) -> RunStatus:
        self.state.stopping = order
        self._command("stop", order.actor, order.why, {"mode": order.mode})
        if order.mode == "drain" and self.state.paused:  # what is to be finished needs what the pause withholds
            self.state.paused = None
            self._command("resume", order.actor, "the run stops", {})
        return self.status()

    @stop.validator
    def _check_stop(self, order: Stop) -> None:
        self._must_run()

    # Events

    @workflow.signal(description="Sent by the pool: an engine lease of this run exists.")
    def granted(self, event: LeaseEvent) -> None:
        known = self.state.engines.get(event.lease)
        if event.role == "engine" and (known is None or known.epoch < event.epoch):
            self.state.engines[event.lease] = EngineView(lease=event.lease, epoch=event.epoch, node=event.members[0])
            self.dirty = True

    @workflow.signal(description="Sent by an engine lease: ready with a version, or down.")
    def lease_report(self, event: LeaseEvent) -> None:
        self.granted(event)
        known = self.state.engines.get(event.lease)
        if known is not None and known.epoch == event.epoch:
            state = "ready" if event.state == "ready" else "down"
            self.state.engines[event.lease] = known.model_copy(update={"state": state, "version": event.version})
            self.state.last_failure = event.reason or self.state.last_failure
            self.state.engine_losses = 0 if state == "ready" else self.state.engine_losses
            self.dirty = True

    @workflow.signal(description="Sent by an engine lease: it was revoked and its engine is parked.")
    def revoked(self, event: LeaseEvent) -> None:
        self._forget(event)

    @workflow.signal(description="Sent by an engine lease: its engine or node is lost.")
    def lease_lost(self, event: LeaseEvent) -> None:
        self.state.last_failure = f"{event.lease}/{event.epoch}: {event.reason}"
        self.state.engine_losses += 1
        if event.reason.startswith("ConfigError"):
            self.fatal = self.state.last_failure
        elif self.state.engine_losses > MAX_LOSSES * len(self.spec.nodes):
            self.fatal = f"engines were lost {self.state.engine_losses} times in a row; the last: {event.reason}"
        self._forget(event)

    @workflow.signal(description="Sent by the pool: what the run's request for engines waits for; empty: nothing.")
    def queued(self, notice: QueueNotice) -> None:
        if notice.request_id == self.state.engine_request:
            self.state.queue_notice = notice.waiting_for
            self._show()

    @workflow.signal(description='Look again at what the run waits for: {"what": "look"}')
    def wake(self, wake: Wake) -> None:
        if wake.what == "data_failed":
            self.fatal = wake.detail
        self.data_stopped = self.data_stopped or wake.what != "look"
        self.dirty = True

    @workflow.query(description="Phase, step, engines, what the run waits for, last failure.")
    def status(self) -> RunStatus:
        state = self.state
        return RunStatus(
            run=self.spec.run,
            phase=state.phase,
            lineage=state.lineage,
            step=state.step,
            steps=self.spec.pipeline.steps,
            version=self._version(),
            paused=state.paused.mode if state.paused else None,
            stopping=state.stopping.mode if state.stopping else None,
            waiting_for=self._waiting(),
            engines=tuple(state.engines[key] for key in sorted(state.engines)),
            evaluations=state.evaluations,
            metrics=state.last_metrics,
            last_failure=state.last_failure,
            warning="; ".join(alarms(state.last_metrics, self.spec.alarms)),
        )

    # Life

    @workflow.run
    async def run(self, given: RunInput) -> RunResult:
        self._must_be_called_by_its_name()
        tags = sorted({tag for node in self.spec.nodes for tag in node.tags})
        workflow.upsert_search_attributes([calls.SF_RUN.value_set(self.spec.run), calls.SF_TAGS.value_set(tags)])
        reconcile = asyncio.create_task(self._reconcile())
        try:
            if not self.state.started:
                await self._start()
            while not self._over():
                await self._boundary()
                if not self._over():
                    await self._step()
            return await self._finish()
        except asyncio.CancelledError:  # "cancel" in the UI: stop at once, in order
            self.state.stopping = Stop(mode="now", why="cancelled")
            await self._abandon("stopped")
            raise
        except Exception as error:
            self.state.last_failure = calls.reason_of(error)
            await self._abandon("failed")
            raise
        finally:
            reconcile.cancel()

    async def _start(self) -> None:
        self._set_phase("starting")
        start = await calls.on_control("prepare_run", self.spec, RunStart, summary=f"open run {self.spec.run}")
        self.state.lineage, self.state.step = start.lineage, start.step
        self.state.checkpoint, self.state.replay = start.checkpoint, start.replay
        self.state.evaluations = start.evaluations
        self.state.opened = True
        await self._start_data()
        await self._want_engines()
        self.state.started = True
        nodes = ", ".join(pipeline.rollout_nodes(self.spec))
        in_queue = timedelta(seconds=self.spec.pool.queue_limit_s)
        await self._wait_unpaused(f"one of the nodes {nodes}", lambda: bool(self.state.engines), in_queue)
        await self._wait_unpaused(f"an engine on {nodes}", lambda: bool(self._ready()), ENGINE_LIMIT)
        await self._warm_trainer()
        await self._evaluate_if_due(first=True)

    async def _warm_trainer(self) -> None:
        """Start the ranks while engines still serve: being resident needs no lease, and the first step finds them."""
        probes: list[ActivityHandle[GangView]] = [
            calls.gang_probe(self.spec.run, node) for node in pipeline.train_nodes(self.spec)
        ]
        try:
            views = [await probe for probe in probes]
        except ActivityError as error:  # the first lease starts them instead
            self.state.last_failure = calls.reason_of(error)
            return
        newest = self.state.checkpoint
        if newest is None:
            return
        ranks = {node.id: node.ranks for node in self.spec.nodes}
        plan = plan_gang(f"{self.spec.run}/{workflow.uuid4().hex[:8]}", ranks, views, newest.version)
        for view in views:
            member = trainer_task(self.spec, plan, view.node, newest, lease="", epoch=0)
            self.warming.append(calls.warm_ranks(member))

    async def _start_data(self) -> bool:
        """Start the data stream; false if one with its id still runs."""
        task = DataInput(
            run=self.spec.run,
            owner=calls.run_id(self.spec.run),
            target_in_flight=self.spec.pipeline.target_in_flight,
        )
        try:
            await workflow.start_child_workflow(
                "DataStream",
                task,
                id=calls.data_id(self.spec.run),
                parent_close_policy=ParentClosePolicy.ABANDON,
                static_summary=f"agents and rewards of {self.spec.run}",
            )
        except WorkflowAlreadyStartedError:
            workflow.logger.info("the data stream of an earlier execution still runs; it is used")
            return False
        return True

    def _over(self) -> bool:
        if self.fatal:
            raise ApplicationError(self.fatal, type="RunFailed", non_retryable=True)
        return self.state.stopping is not None or self.state.step >= self.spec.pipeline.steps

    async def _boundary(self) -> None:
        """Between two steps: nothing of the run is open but handlers, so it may pause or become a new generation."""
        if self.state.paused and not self.state.stopping:
            self._set_phase("paused")
        await self._wait("the end of the pause", lambda: self.state.paused is None or self._cut_short())
        if pipeline.policy_of(self.spec).waits_for_sync:
            await self._wait_unpaused("every engine to serve the new weights", self._synced, self._sync_limit())
        if calls.must_continue_as_new():
            await workflow.wait_condition(
                lambda: workflow.all_handlers_finished() and not (self.dirty or self.reconciling or self.commands)
            )
            if not self.fatal:  # it is no part of what is carried
                workflow.continue_as_new(RunInput(**dict(self.spec), carried=self.state))

    async def _step(self) -> None:
        state = self.state
        self._set_phase("training")
        replay = next((m for m in state.replay if m.step == state.step), None)
        task = StepInput(
            spec=self.spec,
            lineage=state.lineage,
            step=state.step,
            version=self._version(),
            pool=self.pool,
            paused=state.paused is not None,
            replay=replay,
        )
        self.step_running = calls.step_id(self.spec.run, state.lineage, state.step)
        try:
            handle = await workflow.start_child_workflow(
                "RlStep",
                task,
                id=self.step_running,
                result_type=StepResult,
                static_summary=f"step {state.step} of {self.spec.run}",
            )
            self._waits_for(f"step {state.step}")
            await workflow.wait_condition(lambda: handle.done() or self._cut_short())
            await self._stop_step()
            result: StepResult = await handle
        except asyncio.CancelledError:  # the run closes: its step must let go of the lease first
            await calls.tell(calls.step_id(self.spec.run, state.lineage, state.step), "stop", Stop(mode="now"))
            raise
        finally:
            self.step_running = None
            self._waits_for("")
        await self._after_step(result)

    async def _after_step(self, result: StepResult) -> None:
        state = self.state
        if result.outcome == "trained":
            state.checkpoint = result.checkpoint
            state.step += 1
            state.losses = 0
            state.replay = tuple(m for m in state.replay if m.step >= state.step)
            state.last_metrics = result.metrics
            self.dirty = True
            self._set_phase("training")
            await self._evaluate_if_due(first=False)
        elif result.outcome == "gang_lost":
            await self._rewind(result.reason)

    async def _rewind(self, reason: str) -> None:
        """The gang was lost: what it had claimed is replayed under a new lineage."""
        state = self.state
        state.losses += 1
        state.last_failure = f"step {state.step} lost its trainer gang: {reason}"
        if state.losses > MAX_LOSSES:
            raise ApplicationError(
                f"{state.last_failure} ({state.losses} times in a row)", type="GangLost", non_retryable=True
            )
        rewind = RewindInput(run=self.spec.run, from_lineage=state.lineage)
        start = await calls.on_control("rewind", rewind, RunStart, summary=f"rewind lineage {state.lineage}")
        state.lineage, state.step = start.lineage, start.step
        state.checkpoint, state.replay = start.checkpoint, start.replay

    # Evaluation

    async def _evaluate_if_due(self, *, first: bool) -> None:
        every, step = self.spec.evaluation.every, self.state.step
        due = step == 0 if first else bool(every) and step % every == 0 and step < self.spec.pipeline.steps
        if due:
            await self._evaluate()

    async def _evaluate(self) -> None:
        version = self._version()
        if self.spec.data.held_out is None or any(e.version == version for e in self.state.evaluations):
            return
        self._set_phase("evaluating")
        await self._wait_unpaused(f"the engines to serve version {version}", self._synced, self._sync_limit())
        task = EvaluationInput(spec=self.spec, version=version)
        try:
            handle = await workflow.start_child_workflow(
                "Evaluation",
                task,
                id=calls.evaluation_id(self.spec.run, version),
                result_type=EvaluationOutcome,
                static_summary=f"held-out reward of version {version}",
            )
            await self._wait(f"the evaluation of version {version}", lambda: handle.done() or self._cut_short())
            if not handle.done():
                handle.cancel()
                return
            self.state.evaluations = (*self.state.evaluations, await handle)
        except ChildWorkflowError as error:  # a missing evaluation must not cost the run
            self.state.last_failure = f"evaluation of version {version}: {calls.reason_of(error)}"

    # Engines

    async def _want_engines(self) -> None:
        self.state.engine_request = f"{self.spec.run}/engines/{workflow.uuid4().hex[:8]}"
        self.state.engines_wanted = True
        request = LeaseRequest(
            request_id=self.state.engine_request,
            run=self.spec.run,
            role="engine",
            tag="rollout",
            candidates=pipeline.rollout_nodes(self.spec),
            count=None,
            priority=pipeline.ENGINE_PRIORITY,
            owner=calls.run_id(self.spec.run),
            spec=self.spec,
        )
        for _ in range(POOL_TRIES):
            if await calls.tell(self.pool, "request", request):
                return
            self._waits_for(f"{self.pool}, which the first node agent starts")
            await workflow.sleep(POOL_PAUSE)
        raise ApplicationError(
            f"{self.pool} does not run: start a node agent first (`seamlessflow up`)", non_retryable=True
        )

    async def _give_back(self, reason: str) -> None:
        self.state.engines_wanted = False
        order = WithdrawRequest(request_id=self.state.engine_request, reason=reason)
        await calls.tell(self.pool, "withdraw", order)

    async def _reconcile(self) -> None:
        """Carry out what handlers and steps changed: audit, pause, resume, weights, a data stream that ended."""
        while True:
            await workflow.wait_condition(lambda: self.dirty or bool(self.commands))
            self.reconciling, self.dirty = True, False
            while self.commands:
                await self._carry_out(self.commands.pop(0))
            for key in sorted(self.state.engines):
                if key in self.state.engines:
                    await self._bring_up(self.state.engines[key])
            if self.data_stopped and self.state.phase not in ENDED and not self._cut_short():
                # It was told to stop for an earlier execution of the run, or by hand. It says so as its last act, so
                # it may not have closed yet: then its id is still taken.
                if await self._start_data():
                    self.data_stopped = False
                else:
                    await workflow.sleep(DATA_CLOSES)
                    self.dirty = True
            self.reconciling = False
            self._show()

    async def _carry_out(self, entry: AuditEntry) -> None:
        """Record a command and apply it; one that fails is shown and does not stop the ones behind it."""
        try:
            await calls.locally("record_command", entry, type(None), summary=f"audit: {entry.what}")
            await self._apply_command(entry)
        except FailureError as error:
            self.state.last_failure = f"{entry.what}: {calls.reason_of(error)}"

    async def _apply_command(self, entry: AuditEntry) -> None:
        if entry.what in ("pause", "resume"):
            await self._apply_pause()
        elif entry.what == "set_params":
            rate = StreamRate(target_in_flight=self.spec.pipeline.target_in_flight)
            await calls.tell(calls.data_id(self.spec.run), "rate", rate)

    async def _apply_pause(self) -> None:
        paused = self.state.paused
        order = AdmissionPause(run=self.spec.run, stream="train", paused=paused is not None)
        await calls.locally("pause_admission", order, type(None), summary="pause" if paused else "resume")
        if self.step_running:
            await calls.tell(self.step_running, "pause", StepPause(paused=paused is not None))
        if paused and paused.give_back and self.state.engines_wanted:
            await self._give_back("the run is paused and gives its nodes back")
        if not paused and not self.state.engines_wanted and self.state.started:
            await self._want_engines()

    async def _bring_up(self, engine: EngineView) -> None:
        """Bring one engine lease to the newest weights, and to the hold that a pause asks for."""
        hold = self.state.paused is not None and self.state.paused.mode == "now"
        told = max(engine.told or 0, engine.version or 0)
        lease = calls.lease_id(engine.lease, engine.epoch)
        alive = True
        if hold != engine.held:
            alive = await calls.tell(lease, "hold", HoldLease(hold=hold))
        newest = self.state.checkpoint
        knows = engine.state == "granted"  # it reads the newest version itself before it first reports
        if alive and not knows and newest is not None and told < newest.version:
            alive = await calls.tell(lease, "load_weights", newest.weights)
            told = newest.version
        known = self.state.engines.get(engine.lease)
        if known is None or known.epoch != engine.epoch:
            return
        if alive:
            self.state.engines[engine.lease] = known.model_copy(update={"held": hold, "told": told})
        else:
            del self.state.engines[engine.lease]

    def _ready(self) -> list[EngineView]:
        return [e for e in self.state.engines.values() if e.state == "ready"]

    def _synced(self) -> bool:
        """At least one engine serves, and none serves anything but the newest weights."""
        ready = self._ready()
        return bool(ready) and all(e.version == self._version() for e in ready)

    def _sync_limit(self) -> timedelta:
        return timedelta(seconds=self.spec.engine.load_limit_s) + SYNC_SLACK

    def _forget(self, event: LeaseEvent) -> None:
        known = self.state.engines.get(event.lease)
        if known is not None and known.epoch <= event.epoch:
            del self.state.engines[event.lease]
            self.dirty = True

    # The end

    async def _finish(self) -> RunResult:
        stopped = self.state.stopping
        if stopped is None or stopped.mode == "drain":
            await self._evaluate()
        books = await self._close("stopped" if stopped else "finished")
        evaluations = {e.version: e.mean for e in self.state.evaluations}
        return RunResult(
            run=self.spec.run,
            steps=self.state.step,
            version=self._version(),
            reward_before=evaluations.get(0),
            reward_after=evaluations.get(self._version()),
            balanced=books.balanced,
            stopped=stopped is not None,
        )

    async def _abandon(self, how: str) -> None:
        """Close after a failure, which must stay the one that is reported."""
        if not self.state.opened:
            return
        try:
            await self._close(how)
        except ActivityError as error:
            workflow.logger.error("the run could not be closed: %s", calls.reason_of(error))

    async def _close(self, how: str) -> BooksView:
        """Stop the data stream, close the books, give the nodes back and end the resident processes."""
        self._set_phase("ending")
        if await calls.tell(calls.data_id(self.spec.run), "stop"):
            await self._wait_at_most("the data stream to stop", lambda: self.data_stopped, END_LIMIT)
        books = await calls.on_control(
            "finish_run", EndRun(run=self.spec.run, state=how), BooksView, summary="close the books"
        )
        await self._give_back(f"the run has {how}")
        await self._wait_at_most("the engines to park", lambda: not self.state.engines, END_LIMIT)
        await self._end_residency()
        self._set_phase(how)
        return books

    async def _end_residency(self) -> None:
        handles = [
            calls.on_node(
                "end_residency",
                NodeRun(run=self.spec.run, node=node.id),
                type(None),
                queue=nodectl_queue(node.id),
                limit_s=60,
                attempts=3,
                summary=f"end the run's processes on {node.id}",
            )
            for node in self.spec.nodes
        ]
        for handle in handles:
            try:
                await handle
            except ActivityError as error:  # the node is away; its reaper ends them when it is back
                workflow.logger.warning("resident processes were not ended: %s", calls.reason_of(error))

    async def _stop_step(self) -> None:
        if self.step_running and self._cut_short():
            await calls.tell(self.step_running, "stop", Stop(mode="now"))

    # Helpers

    def _cut_short(self) -> bool:
        return bool(self.fatal) or (self.state.stopping is not None and self.state.stopping.mode == "now")

    def _version(self) -> int:
        return self.state.checkpoint.version if self.state.checkpoint else 0

    def _must_be_called_by_its_name(self) -> None:
        """The UI takes any workflow id; leases and steps answer to this one."""
        wanted, given = calls.run_id(self.spec.run), workflow.info().workflow_id
        if given != wanted:
            raise ApplicationError(
                f"the workflow id is {given!r}, the run is named {self.spec.run!r}: start it as {wanted!r}",
                type="ConfigError",
                non_retryable=True,
            )

    def _must_run(self) -> None:
        if self.state.phase in ENDED:
            raise ApplicationError(f"run {self.spec.run} is {self.state.phase}: it takes no more commands")

    def _patched(self, order: SetParams) -> RunSpec:
        """The run file with the patch; raises what is wrong with it."""
        data = self.spec.model_dump(mode="json")
        for section, values in order.patch.items():
            for key, value in values.items():
                if key not in CHANGEABLE.get(section, frozenset()):
                    allowed = ", ".join(f"{s}.{k}" for s in sorted(CHANGEABLE) for k in sorted(CHANGEABLE[s]))
                    raise ApplicationError(f"{section}.{key} cannot be changed while a run lives; these can: {allowed}")
                data[section][key] = value
        try:
            return RunSpec.model_validate(data)
        except ValidationError as error:
            raise ApplicationError(str(error)) from error

    def _command(self, what: str, actor: str, why: str, data: dict[str, Any]) -> None:
        self.commands.append(AuditEntry(run=self.spec.run, actor=actor, what=what, why=why, data=data))

    async def _wait(self, what: str, condition: Callable[[], bool], limit: timedelta | None = None) -> None:
        """A named wait; a run that must end at once does not go on waiting."""
        self._waits_for(what)
        try:
            await workflow.wait_condition(lambda: condition() or self._cut_short(), timeout=limit)
        except TimeoutError:
            failure = self.state.last_failure or "none"
            raise ApplicationError(
                f"run {self.spec.run} waited {limit} for {self._waiting()}; last failure: {failure}",
                type="DeadlineError",
                non_retryable=True,
            ) from None
        finally:
            self._waits_for("")

    async def _wait_unpaused(self, what: str, condition: Callable[[], bool], limit: timedelta) -> None:
        """A wait for engines: a pause, which may take them away, ends it, and it begins anew after the pause."""
        while True:
            await self._wait("the end of the pause", lambda: self.state.paused is None)
            await self._wait(what, lambda: condition() or self.state.paused is not None, limit)
            if self.state.paused is None or self._cut_short():
                return

    async def _wait_at_most(self, what: str, condition: Callable[[], bool], limit: timedelta) -> None:
        self._waits_for(what)
        try:
            await workflow.wait_condition(condition, timeout=limit)
        except TimeoutError:
            workflow.logger.warning("%s took longer than %s; going on", what, limit)
        finally:
            self._waits_for("")

    def _waiting(self) -> str:
        notice = self.state.queue_notice
        return f"{self.waiting_for} ({notice})" if self.waiting_for and notice else self.waiting_for or notice

    def _waits_for(self, what: str) -> None:
        self.waiting_for = what
        self._show()

    def _set_phase(self, phase: str) -> None:
        self.state.phase = phase
        workflow.upsert_search_attributes([calls.SF_STEP.value_set(self.state.step), calls.SF_PHASE.value_set(phase)])
        self._show()

    def _show(self) -> None:
        """Renew the page that the UI shows; it is asked for like a query and is no part of history."""
        view = RunView(self.spec, self.state, self._waiting(), self.step_running, workflow.info().namespace)
        workflow.set_current_details(run_page(view))
