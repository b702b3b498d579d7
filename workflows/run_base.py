"""What all parts of a training run share: its state, named waits, phases and the page it shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows import calls
from workflows.messages import AuditEntry, LeaseRequest, PolicyView, RunInput, RunState
from workflows.run_page import RunView, run_page
from workflows.scheduling import pipeline


class RunBase:
    """State and mechanics; the rest of :class:`workflows.training_run.TrainingRun` is made of its subclasses."""

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

    def policy(self) -> PolicyView:
        """The pipeline, as :meth:`renew_policy` found it."""
        if self.state.policy is None:
            raise ApplicationError("the pipeline's policy is not known yet", non_retryable=True)
        return self.state.policy

    async def renew_policy(self) -> None:
        """Ask for the pipeline's fields: the run file may name the user's own, which only activities load."""
        self.state.policy = await calls.locally(
            "pipeline_policy", self.spec, PolicyView, summary=f"policy of the pipeline {self.spec.pipeline.name}"
        )

    def version(self) -> int:
        """Newest committed weights."""
        return self.state.checkpoint.version if self.state.checkpoint else 0

    def cut_short(self) -> bool:
        """Whether the run must end at once."""
        return bool(self.fatal) or (self.state.stopping is not None and self.state.stopping.mode == "now")

    def over(self) -> bool:
        """Whether there is no further step; raises what failed the run."""
        if self.fatal:
            raise ApplicationError(self.fatal, type="RunFailed", non_retryable=True)
        ended = self.state.data_ended or self.state.step >= self.spec.pipeline.steps
        return ended or self.state.stopping is not None

    def command(self, what: str, actor: str, why: str, data: dict[str, Any]) -> None:
        """Note a command for :meth:`TrainingRun._reconcile` to carry out."""
        self.commands.append(AuditEntry(run=self.spec.run, actor=actor, what=what, why=why, data=data))

    async def ask_pool(self, request: LeaseRequest) -> None:
        """Send a request; waits a while for a pool that is only just starting."""
        for _ in range(calls.POOL_TRIES):
            if await calls.tell(self.pool, "request", request):
                return
            self.waits_for(f"{self.pool}, which the first node agent starts")
            await workflow.sleep(calls.POOL_PAUSE)
        raise ApplicationError(
            f"{self.pool} does not run: start a node agent first (`seamlessflow up`)", non_retryable=True
        )

    async def wait(self, what: str, condition: Callable[[], bool], limit: timedelta | None = None) -> None:
        """A named wait; a run that must end at once does not go on waiting."""
        self.waits_for(what)
        try:
            await workflow.wait_condition(lambda: condition() or self.cut_short(), timeout=limit)
        except TimeoutError:
            failure = self.state.last_failure or "none"
            raise ApplicationError(
                f"run {self.spec.run} waited {limit} for {self.waiting()}; last failure: {failure}",
                type="DeadlineError",
                non_retryable=True,
            ) from None
        finally:
            self.waits_for("")

    async def wait_unpaused(self, what: str, condition: Callable[[], bool], limit: timedelta) -> None:
        """A wait for engines: a pause, which may take them away, ends it, and it begins anew after the pause."""
        while True:
            await self.wait("the end of the pause", lambda: self.state.paused is None)
            await self.wait(what, lambda: condition() or self.state.paused is not None, limit)
            if self.state.paused is None or self.cut_short():
                return

    async def wait_at_most(self, what: str, condition: Callable[[], bool], limit: timedelta) -> None:
        """A wait that is given up after ``limit``."""
        self.waits_for(what)
        try:
            await workflow.wait_condition(condition, timeout=limit)
        except TimeoutError:
            workflow.logger.warning("%s took longer than %s; going on", what, limit)
        finally:
            self.waits_for("")

    def waiting(self) -> str:
        """What the run waits for, and what the pool says of it."""
        notice = self.state.queue_notice
        return f"{self.waiting_for} ({notice})" if self.waiting_for and notice else self.waiting_for or notice

    def waits_for(self, what: str) -> None:
        """Say what the run waits for; empty: for nothing."""
        self.waiting_for = what
        self.show()

    def set_phase(self, phase: str) -> None:
        """Change the phase, everywhere it is shown."""
        self.state.phase = phase
        workflow.upsert_search_attributes([calls.SF_STEP.value_set(self.state.step), calls.SF_PHASE.value_set(phase)])
        self.show()

    def show(self) -> None:
        """Renew the page that the UI shows; it is asked for like a query and is no part of history."""
        if not workflow.in_workflow():  # a worker that stops collects its workflows; their waits end outside of any
            return
        view = RunView(self.spec, self.state, self.waiting(), self.step_running, workflow.info().namespace)
        workflow.set_current_details(run_page(view))

    def train_nodes(self) -> tuple[str, ...]:
        return pipeline.train_nodes(self.spec)
