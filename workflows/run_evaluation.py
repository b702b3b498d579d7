"""Evaluations of a run: beside training where an engine can be spared for them, else between two steps.

Beside training one engine keeps the weights that are judged while the others go on to newer ones; the proxy gives an
evaluation's requests to no other. Such an engine is on a node that does not train, so that no update takes it away.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError
from temporalio.workflow import ChildWorkflowHandle

from workflows import calls
from workflows.messages import EngineView, EvaluationInput, EvaluationOutcome
from workflows.run_leases import Leases

SYNC_SLACK = timedelta(minutes=5)
"""Beyond what one engine may take to load: after it, those that did not are out of service and not waited for."""


class Evaluations(Leases):
    """When the newest weights are evaluated, and by which engine."""

    _beside: asyncio.Task[None] | None = None

    async def evaluate_if_due(self, *, first: bool) -> None:
        """Evaluate before the first step, and each ``evaluation.every`` steps; not while an evaluation is in work."""
        every, step = self.spec.evaluation.every, self.state.step
        due = step == 0 if first else bool(every) and step % every == 0 and step < self.spec.pipeline.steps
        if not due or not self._unknown():
            return
        if self.evaluating():  # a second engine is not spared
            self.state.last_failure = f"version {self.version()} is not evaluated: that of an older one is in work"
            return
        spare, newest = self._spare(), self.state.checkpoint
        if spare is None or newest is None:
            await self.evaluate()
            return
        self.state.spared, self.state.spared_for = spare.lease, newest.weights
        self.dirty = True
        self._beside = asyncio.create_task(self._evaluate_beside(newest.version))

    async def evaluate(self) -> None:
        """Evaluate the newest weights, once, and wait for it."""
        await self.evaluation_ended()
        version = self.version()
        if not self._unknown():
            return
        self.set_phase("evaluating")
        await self.wait_unpaused(f"the engines to serve version {version}", self.synced, self.sync_limit())
        await self._judge(version, named=True)

    async def evaluation_ended(self) -> None:
        """Wait for the evaluation beside training, if there is one."""
        if self._beside is not None:
            version = self.state.spared_for.version if self.state.spared_for else self.version()
            await self.wait(f"the evaluation of version {version}", self._beside.done)
            self.evaluation_cancelled()

    def evaluation_cancelled(self) -> None:
        """There is none beside training any more; the engine that was spared for it takes the newest weights."""
        if self._beside is not None:
            self._beside.cancel()
            self._beside = None
        self.state.spared, self.dirty = "", True

    def evaluating(self) -> bool:
        """Whether an evaluation is in work beside training."""
        return self._beside is not None and not self._beside.done()

    def sync_limit(self) -> timedelta:
        return timedelta(seconds=self.spec.engine.load_limit_s) + SYNC_SLACK

    async def _evaluate_beside(self, version: int) -> None:
        try:
            await self._judge(version, named=False)
        finally:
            self.state.spared, self.dirty = "", True

    async def _judge(self, version: int, *, named: bool) -> None:
        """The evaluation itself; ``named``: the run waits for it."""
        try:
            handle = await self._start_evaluation(version)
        except WorkflowAlreadyStartedError:  # of an execution of the run that was terminated, and ends by itself
            self.state.last_failure = f"evaluation of version {version}: an earlier one is still in work"
            return
        try:
            if named:
                await self.wait(f"the evaluation of version {version}", lambda: handle.done() or self.cut_short())
            else:
                await self._keep_spared(handle, version)
            if handle.done():
                self.state.evaluations = (*self.state.evaluations, await handle)
                return
            handle.cancel()
            if not self.cut_short():
                self.state.last_failure = f"evaluation of version {version}: the engine that kept its weights is gone"
        except asyncio.CancelledError:
            handle.cancel()
            raise
        except ChildWorkflowError as error:  # a missing evaluation must not cost the run
            self.state.last_failure = f"evaluation of version {version}: {calls.reason_of(error)}"

    async def _keep_spared(self, handle: ChildWorkflowHandle[Any, EvaluationOutcome], version: int) -> None:
        """Wait for an evaluation; an engine that leaves is replaced while there are no newer weights."""
        while True:
            await workflow.wait_condition(lambda: handle.done() or self.cut_short() or not self._is_spared(version))
            self.state.spared = ""
            await workflow.wait_condition(
                lambda: handle.done() or self.cut_short() or self.version() != version or self._spare() is not None
            )
            spare = self._spare()
            if handle.done() or self.cut_short() or self.version() != version or spare is None:
                return
            self.state.spared, self.dirty = spare.lease, True

    async def _start_evaluation(self, version: int) -> ChildWorkflowHandle[Any, EvaluationOutcome]:
        return await workflow.start_child_workflow(
            "Evaluation",
            EvaluationInput(spec=self.spec, version=version),
            id=calls.evaluation_id(self.spec.run, version),
            result_type=EvaluationOutcome,
            execution_timeout=timedelta(seconds=self.spec.evaluation.time_limit_s),
            static_summary=f"held-out reward of version {version}",
        )

    def _unknown(self) -> bool:
        """Whether there are held-out tasks and the newest weights were not judged by them yet."""
        return self.spec.data.held_out is not None and all(e.version != self.version() for e in self.state.evaluations)

    def _spare(self) -> EngineView | None:
        """An engine that can stay at the newest weights: others roll out beside it, and its node does not train."""
        policy = self.policy()
        others = len(self.rollers()) > 1
        idle = [e for e in self.serving() if e.node not in self.train_nodes() and self._can_have(e, self.version())]
        if policy.waits_for_sync or not others or not idle:
            return None
        return min(idle, key=lambda engine: engine.lease)

    def _is_spared(self, version: int) -> bool:
        known = self.state.engines.get(self.state.spared)
        return known is not None and self._can_have(known, version)

    def _can_have(self, engine: EngineView, version: int) -> bool:
        """Whether an engine has these weights or is on its way to them; it never goes back to older ones."""
        return (engine.version or 0) <= version
