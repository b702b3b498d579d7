"""The steps of a run: what happens between two of them, each step itself, rewinds, changes of roles."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows import calls
from workflows.messages import (
    FlowInput,
    FlowView,
    RewindInput,
    RunInput,
    RunStart,
    StepInput,
    StepResult,
    Stop,
    SwitchRecord,
)
from workflows.run_evaluation import Evaluations
from workflows.run_leases import MAX_LOSSES
from workflows.scheduling.decision import Decision
from workflows.scheduling.recall import StepWaits
from workflows.scheduling.switching import STAY, GroupFlow, gain_of_return, with_hindsight, worth_switching

RETURN_LIMIT = timedelta(seconds=60)
KEPT_SWITCHES = 8


class Steps(Evaluations):
    """The main loop's parts."""

    async def boundary(self) -> None:
        """Between two steps: nothing of the run is open but handlers, so it may pause or become a new generation."""
        if self.state.paused and not self.state.stopping:
            self.set_phase("paused")
        await self.wait("the end of the pause", lambda: self.state.paused is None or self.cut_short())
        await self.renew_policy()
        if self.policy().waits_for_sync:
            back = "the train nodes to roll out again"  # unless somebody has taken them
            await self.wait_at_most(back, lambda: self.state.returned_at is None or self._detained(), RETURN_LIMIT)
            await self.wait_unpaused("every engine to serve the new weights", self.synced, self.sync_limit())
        if calls.must_continue_as_new() and not self.evaluating():  # a new generation would end its children
            await workflow.wait_condition(
                lambda: workflow.all_handlers_finished() and not (self.dirty or self.reconciling or self.commands)
            )
            if not self.fatal:  # it is no part of what is carried
                workflow.continue_as_new(RunInput(**dict(self.spec), carried=self.state))

    def _detained(self) -> bool:
        return self.state.paused is not None or self.cut_short()

    async def make_step(self) -> None:
        """One step, whatever becomes of it."""
        state = self.state
        self.set_phase("training")
        self.step_running = calls.step_id(self.spec.run, state.lineage, state.step)
        try:
            handle = await workflow.start_child_workflow(
                "RlStep",
                self._step_input(),
                id=self.step_running,
                result_type=StepResult,
                static_summary=f"step {state.step} of {self.spec.run}",
            )
            self.waits_for(f"step {state.step}")
            await workflow.wait_condition(lambda: handle.done() or self.cut_short())
            if self.cut_short():
                await calls.tell(self.step_running, "stop", Stop(mode="now"))
            result: StepResult = await handle
        except asyncio.CancelledError:  # the run closes: its step must let go of the lease first
            await calls.tell(calls.step_id(self.spec.run, state.lineage, state.step), "stop", Stop(mode="now"))
            raise
        finally:
            self.step_running = None
            self.state.updating, self.state.leftover = False, 0
            self.waits_for("")
        await self._after_step(result)

    def _step_input(self) -> StepInput:
        state = self.state
        ready = state.gang is not None and state.gang.state == "ready"
        return StepInput(
            spec=self.spec,
            lineage=state.lineage,
            step=state.step,
            version=self.version(),
            pool=self.pool,
            owner=calls.run_id(self.spec.run),
            policy=self.policy(),
            paused=state.paused is not None,
            replay=next((m for m in state.replay if m.step == state.step), None),
            gang=state.gang if ready else None,
            companions=tuple(state.companions[lease] for lease in sorted(state.companions)),
            cost=state.cost,
            recall=self._recall_at(),
        )

    def _recall_at(self) -> int:
        """Complete groups at which the gang is called to accumulate them. Where nobody else rolls out, the batch has to
        be complete: the others would never be."""
        wanted, policy = self.spec.algorithm.groups_per_step, self.policy()
        if policy.trainers == "own" or not policy.accumulates:
            return 0
        return wanted if self._alone() else self.state.recall.at(wanted)

    def _alone(self) -> bool:
        """Whether nobody rolls out beside the train nodes."""
        return not {engine.node for engine in self.state.engines.values()} - set(self.train_nodes())

    async def _after_step(self, result: StepResult) -> None:
        state = self.state
        self._learn(result)
        if result.outcome == "trained":
            state.checkpoint = result.checkpoint
            state.step += 1
            state.losses = state.companion_losses = 0
            state.replay = tuple(m for m in state.replay if m.step >= state.step)
            state.last_metrics = result.metrics
            self.dirty = True
            await self._change_back(result)
            self.set_phase("training")
            await self.evaluate_if_due(first=False)
            return
        await self.let_gang_go(result.reason)
        if result.outcome == "gang_lost":
            await self._rewind(result.reason)
        elif result.outcome == "data_ended":
            state.data_ended = True

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

    # Changes of roles

    async def _change_back(self, result: StepResult) -> None:
        """An update is made: the train nodes return to rollout, unless they never roll out or it would not pay."""
        policy, done = self.policy(), f"step {self.state.step - 1} is trained"
        gives_back = self.state.paused is not None and self.state.paused.give_back
        preempts = policy.trainers == "preempt"
        if self.over() or gives_back or (preempts and policy.holds_rollout):
            await self.let_gang_go(done)
        elif preempts and self.state.gang is not None:
            decision = await self._worth_returning(result)
            self._remember(self.state.step, decision)
            if decision.what != STAY:
                await self.let_gang_go(f"{done}; {decision.why}")

    async def _worth_returning(self, result: StepResult) -> Decision:
        since = self.state.serving_at
        ask = FlowInput(spec=self.spec, step=self.state.step, nodes=self.train_nodes(), since=since or 0.0)
        flow = await calls.locally("group_flow", ask, FlowView, summary="how groups come in")
        if since is not None and flow.decoding is not None:
            self.state.cost = self.state.cost.with_measured("first_token", flow.decoding - since)
            self.state.serving_at = None
        groups = GroupFlow(flow.ready, flow.wanted, flow.supply, flow.in_flight, flow.rate)
        if result.waited_s is not None:
            starved = flow.supply <= flow.in_flight
            took = StepWaits(result.called, result.waited_s, result.trained_s, result.rollout_s, starved)
            self.state.recall = self.state.recall.after(took, groups)
        ahead = self.policy().accumulates
        alone = self._alone() if ahead else self.rollers() <= set(self.train_nodes())
        known = {"train_s": self.state.trained_s, "idled_s": self.state.recall.idled_s} if ahead else {}
        gain = gain_of_return(groups, alone=alone, **known)
        cost = self.state.cost.total_s
        return worth_switching(gain, cost, what_for="rolling out until the next batch", batch_s=gain)

    def _learn(self, result: StepResult) -> None:
        """Note what the change to training took, and what earlier decisions turned out to gain."""
        if result.release_s is not None:
            self.state.cost = self.state.cost.with_measured("release", result.release_s)
        if result.load_s is not None:
            self.state.cost = self.state.cost.with_measured("load", result.load_s)
        self.state.trained_s = result.trained_s
        cost = self.state.cost.total_s
        if result.claimed_at is not None and cost is not None:
            self.state.switches = tuple(_hindsight(record, result.claimed_at, cost) for record in self.state.switches)
        if result.taken is not None:
            self._remember(self.state.step, result.taken, at=result.claimed_at)

    def _remember(self, step: int, decision: Decision, at: float | None = None) -> None:
        record = SwitchRecord(step=step, decision=decision, at=at or workflow.now().timestamp())
        self.state.switches = (*self.state.switches, record)[-KEPT_SWITCHES:]


def _hindsight(record: SwitchRecord, claimed_at: float, cost_s: float) -> SwitchRecord:
    if record.measured_gain_s is not None or record.decision.predicted_gain_s is None or claimed_at <= record.at:
        return record
    gain = with_hindsight(record.decision, claimed_at - record.at, cost_s)
    return record.model_copy(update={"measured_gain_s": gain})
