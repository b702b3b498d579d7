"""What people tell a run: pause, resume, checkpoint, change values, stop. Handlers note it; the run carries it out."""

from __future__ import annotations

from datetime import timedelta

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows.alarms import alarms
from workflows.messages import CheckpointRef, Command, Pause, RunStatus, SetParams, Stop
from workflows.run_base import RunBase
from workflows.run_page import ENDED
from workflows.spec import RunSpec

CHECKPOINT_SLACK = timedelta(seconds=60)
"""What an update may take beyond its own time limit before ``checkpoint_now`` gives up."""
CHANGEABLE = {
    "pipeline": frozenset({"steps", "max_staleness", "target_in_flight", "batch_time_limit_s"}),
    "evaluation": frozenset({"every"}),
}


class Commands(RunBase):
    """Updates and the query ``status``."""

    @workflow.update(
        description='Pause: {"mode": "drain"} lets sessions end, {"mode": "now"} cuts them; '
        '"give_back": true frees the nodes'
    )
    async def pause(self, order: Pause) -> RunStatus:
        self.state.paused = order
        self.command("pause", order.actor, order.why, {"mode": order.mode, "give_back": order.give_back})
        return self.status()

    @pause.validator
    def _check_pause(self, order: Pause) -> None:
        self._must_run()

    @workflow.update(description='Go on after a pause: {"actor": "ann", "why": "GPU is back"}')
    async def resume(self, order: Command) -> RunStatus:
        self.state.paused = None
        self.command("resume", order.actor, order.why, {})
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
        limit = timedelta(seconds=self.spec.trainer.step_time_limit_s) + CHECKPOINT_SLACK
        self.command("checkpoint_now", order.actor, order.why, {})
        try:
            await workflow.wait_condition(lambda: not self.makes_update() or self.state.step != step, timeout=limit)
        except TimeoutError:
            raise ApplicationError(
                f"step {step} of run {self.spec.run} made no checkpoint within {limit}; it waits for "
                f"{self.waiting() or 'nothing'}",
                type="DeadlineError",
            ) from None
        if self.state.checkpoint is None:
            raise ApplicationError(f"run {self.spec.run} has no checkpoint yet: it is {self.state.phase}")
        return self.state.checkpoint

    @workflow.update(
        description='Change values of a running job: {"patch": {"pipeline": {"steps": 40, "target_in_flight": 32}}}'
    )
    async def set_params(self, order: SetParams) -> RunStatus:
        self.spec = self._patched(order)
        self.command("set_params", order.actor, order.why, dict(order.patch))
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
        self.command("stop", order.actor, order.why, {"mode": order.mode})
        if order.mode == "drain" and self.state.paused:  # what is to be finished needs what the pause withholds
            self.state.paused = None
            self.command("resume", order.actor, "the run stops", {})
        return self.status()

    @stop.validator
    def _check_stop(self, order: Stop) -> None:
        self._must_run()

    @workflow.query(description="Phase, step, engines, what the run waits for, last failure.")
    def status(self) -> RunStatus:
        state = self.state
        return RunStatus(
            run=self.spec.run,
            phase=state.phase,
            lineage=state.lineage,
            step=state.step,
            steps=self.spec.pipeline.steps,
            version=self.version(),
            paused=state.paused.mode if state.paused else None,
            stopping=state.stopping.mode if state.stopping else None,
            waiting_for=self.waiting(),
            engines=tuple(state.engines[key] for key in sorted(state.engines)),
            evaluations=state.evaluations,
            metrics=state.last_metrics,
            last_failure=state.last_failure,
            warning="; ".join(alarms(state.last_metrics, self.spec.alarms)),
            pipeline=self.spec.pipeline.name,
            gang=f"{state.gang.lease}/{state.gang.epoch}" if state.gang else None,
            step_running=self.step_running,
            queue_notice=state.queue_notice,
            companions=tuple(state.companions[lease] for lease in sorted(state.companions)),
            switch_cost=state.cost,
            switches=state.switches,
        )

    def makes_update(self) -> bool:
        """Whether a step has its batch and makes its update."""
        return self.step_running is not None and self.state.updating

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
