"""``TrainingRun``: one training job; the input is its run file as JSON.

The main loop makes steps (:mod:`workflows.run_steps`); a second loop, :meth:`TrainingRun._reconcile`, brings engines to
the newest weights (:mod:`workflows.run_leases`) and carries out commands (:mod:`workflows.run_commands`) while a step
is in work. Handlers only change state. The run's position is a ledger fact, so a run that was terminated goes on where
it was when it is started again under the same name.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, WorkflowAlreadyStartedError
from temporalio.workflow import ActivityHandle, ParentClosePolicy

from workflows import calls
from workflows.gang_lease import trainer_task
from workflows.messages import (
    AdmissionPause,
    AuditEntry,
    BooksView,
    DataInput,
    EndRun,
    GangView,
    NodeRun,
    RunInput,
    RunResult,
    RunStart,
    StepPause,
    Stop,
    StreamRate,
    Wake,
)
from workflows.queues import nodectl_queue
from workflows.run_commands import Commands
from workflows.run_page import ENDED
from workflows.run_steps import Steps
from workflows.scheduling import pipeline
from workflows.scheduling.gang import plan_gang

ENGINE_LIMIT = timedelta(minutes=15)
END_LIMIT = timedelta(seconds=60)
DATA_CLOSES = timedelta(seconds=1)


@workflow.defn(name="TrainingRun", failure_exception_types=[Exception])
class TrainingRun(Commands, Steps):
    """See the module. Id ``run/<run>``."""

    @workflow.init
    def __init__(self, given: RunInput) -> None:
        super().__init__(given)
        self.warming: list[ActivityHandle[None]] = []

    @workflow.signal(description='Look again at what the run waits for: {"what": "look"}')
    def wake(self, wake: Wake) -> None:
        if wake.what == "data_failed":
            self.fatal = wake.detail
        self.data_stopped = self.data_stopped or wake.what != "look"
        self.dirty = True

    @workflow.run
    async def run(self, given: RunInput) -> RunResult:
        self._must_be_called_by_its_name()
        tags = sorted({tag for node in self.spec.nodes for tag in node.tags})
        workflow.upsert_search_attributes([calls.SF_RUN.value_set(self.spec.run), calls.SF_TAGS.value_set(tags)])
        reconcile = asyncio.create_task(self._reconcile())
        try:
            if not self.state.started:
                await self._start()
            while not self.over():
                await self.boundary()
                if not self.over():
                    await self.make_step()
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

    # The start

    async def _start(self) -> None:
        self.set_phase("starting")
        await self.renew_policy()
        start = await calls.on_control("prepare_run", self.spec, RunStart, summary=f"open run {self.spec.run}")
        self.state.lineage, self.state.step = start.lineage, start.step
        self.state.checkpoint, self.state.replay = start.checkpoint, start.replay
        self.state.evaluations = start.evaluations
        self.state.opened = True
        await self._start_data()
        await self.want_companions()
        await self.want_engines()
        self.state.started = True
        named = ", ".join(pipeline.rollout_nodes(self.spec, self.policy().trainers))
        nodes = "any node that can roll out" if self.spec.pool.nodes == "any" else f"one of the nodes {named}"
        in_queue = timedelta(seconds=self.spec.pool.queue_limit_s)
        await self.wait_unpaused(nodes, lambda: bool(self.state.engines), in_queue)
        await self.wait_unpaused(f"an engine on {nodes}", self.serves, ENGINE_LIMIT)
        await self._warm_trainer()
        await self.evaluate_if_due(first=True)

    async def _warm_trainer(self) -> None:
        """Start the ranks while engines still serve: being resident needs no lease, and the first step finds them."""
        probes: list[ActivityHandle[GangView]] = [calls.gang_probe(self.spec.run, node) for node in self.train_nodes()]
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

    # What changes while the main loop waits

    async def _reconcile(self) -> None:
        """Carry out what handlers and steps changed: audit, pause, resume, weights, a data stream that ended."""
        while True:
            await workflow.wait_condition(lambda: self.dirty or bool(self.commands))
            self.reconciling, self.dirty = True, False
            while self.commands:
                await self._carry_out(self.commands.pop(0))
            for key in sorted(self.state.engines):
                if key in self.state.engines:
                    await self.bring_up(self.state.engines[key])
            if self.data_stopped and self.state.phase not in ENDED and not self.cut_short():
                # It was told to stop for an earlier execution of the run, or by hand. It says so as its last act, so
                # it may not have closed yet: then its id is still taken.
                if await self._start_data():
                    self.data_stopped = False
                else:
                    await workflow.sleep(DATA_CLOSES)
                    self.dirty = True
            self.reconciling = False
            self.show()

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
            await self.give_back("the run is paused and gives its nodes back")
        if not paused and not self.state.engines_wanted and self.state.started:
            await self.want_companions()
            await self.want_engines()

    # The end

    async def _finish(self) -> RunResult:
        stopped = self.state.stopping
        if stopped is None or stopped.mode == "drain":
            await self.evaluate()
        books = await self._close("stopped" if stopped else "finished")
        evaluations = {e.version: e.mean for e in self.state.evaluations}
        return RunResult(
            run=self.spec.run,
            steps=self.state.step,
            version=self.version(),
            reward_before=evaluations.get(0),
            reward_after=evaluations.get(self.version()),
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
        self.set_phase("ending")
        self.evaluation_cancelled()
        if await calls.tell(calls.data_id(self.spec.run), "stop"):
            await self.wait_at_most("the data stream to stop", lambda: self.data_stopped, END_LIMIT)
        books = await calls.on_control(
            "finish_run", EndRun(run=self.spec.run, state=how), BooksView, summary="close the books"
        )
        self.state.updating = False
        await self.give_back(f"the run has {how}")
        done = "the engines to park, and reference and critic" if self.state.companions else "the engines to park"
        await self.wait_at_most(done, lambda: not (self.state.engines or self.state.companions), END_LIMIT)
        await self._end_residency()
        self.set_phase(how)
        return books

    async def _end_residency(self) -> None:
        handles = [
            calls.on_node(
                "end_residency",
                NodeRun(run=self.spec.run, node=node),
                type(None),
                queue=nodectl_queue(node),
                limit_s=60,
                attempts=3,
                summary=f"end the run's processes on {node}",
            )
            for node in (*(named.id for named in self.spec.nodes), *self.state.guests)
        ]
        for handle in handles:
            try:
                await handle
            except ActivityError as error:  # the node is away; its reaper ends them when it is back
                workflow.logger.warning("resident processes were not ended: %s", calls.reason_of(error))

    def _must_be_called_by_its_name(self) -> None:
        """The UI takes any workflow id; leases and steps answer to this one."""
        wanted, given = calls.run_id(self.spec.run), workflow.info().workflow_id
        if given != wanted:
            raise ApplicationError(
                f"the workflow id is {given!r}, the run is named {self.spec.run!r}: start it as {wanted!r}",
                type="ConfigError",
                non_retryable=True,
            )
