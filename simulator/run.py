"""One run on the simulated cluster: the steps of ``TrainingRun`` and ``RlStep``, with the same decisions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import simpy

from simulator.cluster import Cluster, Costs, SimulatedNode
from simulator.engine import Engine
from simulator.fleet import POOL_NODES, Fleet, Gang, Process, Rack
from simulator.lending import Hysteresis, Lending, Moment
from simulator.measure import NodeClock, Result, Segment, StepFigures
from simulator.rollout import Group, Rollout
from simulator.service import Service
from simulator.trouble import trouble
from simulator.workload import Workload
from workflows.scheduling import roofline
from workflows.scheduling.admission import supply
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.pipeline import PipelinePolicy
from workflows.scheduling.recall import part_of
from workflows.scheduling.selection import Selection, ordinal_window
from workflows.scheduling.switching import STAY, GroupFlow
from workflows.scheduling.triggers import UPDATE, RolloutFacts

MANY = 1 << 20
MAX_STEP_S = 30 * 86400.0
"""A simulated step that takes longer than this waits for something that cannot happen."""


@dataclass(frozen=True)
class Scenario:
    """All that a simulation depends on. ``policy`` is the real one, or a user's."""

    policy: PipelinePolicy
    cluster: Cluster
    model: ModelCost
    workload: Workload
    group_size: int
    lending: Callable[[Costs], Lending] = Hysteresis
    """When train nodes that roll out are called, and whether they return."""
    selection: Selection = ordinal_window
    """Which complete groups make a batch."""
    seed: int = 0
    target_in_flight: int = 1 << 40
    batch_time_limit_s: float = float("inf")
    warm_up: int = 0
    """Updates before the measured time begins: without the filling at a run's start."""
    stop_after: int | None = None
    """Updates after which to stop and measure while the run would go on: without the emptying at a run's end."""
    stands_for: int = 1
    """Real nodes for each simulated one; see :mod:`simulator.cohorts`."""
    segments: bool = False
    """Keep what each node did when, for a picture."""


@dataclass
class Wait:
    """What a gang waited for in one step."""

    groups: int
    seconds: float = 0.0
    complete_at: float = 0.0
    called: bool = False
    """Whether it was called from rollout, rather than kept."""


class Simulation:
    """Builds the parts, runs them once, and measures."""

    def __init__(self, scenario: Scenario) -> None:
        self._given = scenario
        self._policy = scenario.policy
        self._costs = scenario.cluster.costs
        self._env = simpy.Environment()
        self._segments: list[Segment] = []
        self._failures = 0
        self._figures: list[StepFigures] = []
        self._began = 0.0
        self._changed = self._env.event()
        self._services: dict[int, Service] = {}
        sessions = scenario.workload.sessions(
            scenario.seed, scenario.policy.groups_per_step, scenario.group_size, scenario.stands_for
        )
        self._rollout = Rollout(
            self._env,
            sessions,
            scenario.group_size,
            scenario.target_in_flight,
            scenario.selection,
            complete=self._tell,
        )
        self._live_context = scenario.workload.live_context()
        self._racks = list(self._make_racks())
        self._trainers = [rack for rack in self._racks if "train" in rack.tags]
        self._fleet = Fleet(self._env, self._racks, self._priority, self._rollout, self._costs)
        self._lending = scenario.lending(self._costs)
        preempts = self._policy.trainers == "preempt"
        self._calls_early = preempts and (self._policy.accumulates or self._lending.recall_at(MANY) < MANY)
        self._kept: Gang | None = None
        self._wait = Wait(0)
        self._last = (0.0, 0)
        self._decisions: list[str] = []

    def run(self) -> Result:
        """The whole run, in simulated time; a :class:`Result` of it."""
        started = time.perf_counter()
        self._own = self._policy.trainers == "own"
        engines = [r for r in self._racks if "rollout" in r.tags and not (self._own and "train" in r.tags)]
        self._fleet.want_engines(engines)
        trouble(self._env, self._given, self._racks, self._fleet, self._count_failure)
        try:
            self._env.run(self._env.process(self._steps()))
        except RuntimeError as error:  # simpy has no event left, or a step waits for too long
            raise RuntimeError(f"a step waits for groups that cannot be complete: {self._where()}") from error
        return self._result(time.perf_counter() - started)

    def _where(self) -> str:
        facts = self._rollout.facts()
        return (
            f"{len(self._figures)} updates, {len(self._rollout.ready)} of {self._policy.groups_per_step} groups ready, "
            f"{facts.running} sessions running, {len(self._fleet.engines())} engines serving"
        )

    # Steps

    def _steps(self) -> Process:
        for step in range(self._given.stop_after or self._policy.steps):
            if self._policy.waits_for_sync:
                yield from self._until_synced()
            admit_until = functools.partial(self._policy.admit_until, step)
            self._rollout.open_step(step, self._policy.min_version(step), admit_until)
            yield from self._step(step)
            if step + 1 == self._given.warm_up:
                self._measure_from_now()

    def _step(self, step: int) -> Process:
        began, wanted = self._env.now, self._policy.groups_per_step
        if step == 0:
            yield self._env.timeout(self._costs.trainer_start_s)
        gang, self._kept = self._kept, None
        called = gang is None
        if gang is None and self._calls_early:
            yield from self._until_ready(began, self._lending.recall_at(wanted))
            gang = yield self._fleet.acquire(self._trainers)
        self._wait = Wait(wanted - len(self._rollout.ready), called=called)
        if self._policy.accumulates:
            gang = gang or (yield self._fleet.acquire(self._trainers))
            groups, gang, train_s = yield from self._train_as_they_come(gang)
        else:
            yield from self._until_ready(began, wanted)
            self._wait.seconds = self._env.now - began
            groups = self._rollout.take(wanted)
            yield self._env.timeout(self._costs.claim_s)
            gang = gang or (yield self._fleet.acquire(self._trainers))
            gang, train_s = yield from self._train(gang, groups, self._costs.train_fixed_s)
        yield self._env.timeout(self._costs.commit_s)
        self._figures.append(self._figures_of(step, groups, train_s, self._env.now - began - train_s))
        self._fleet.publish(step + 1)
        self._after(step, gang, train_s, self._wait.complete_at - began)

    def _after(self, step: int, gang: Gang, train_s: float, rollout_s: float) -> None:
        """An update is published: its nodes return to rollout, unless that would not pay."""
        preempts = self._policy.trainers == "preempt" and not self._policy.holds_rollout
        if preempts and step + 1 < self._policy.steps and not gang.lost.triggered:
            decision = self._lending.returns(self._moment(step + 1, train_s, rollout_s))
            self._decisions.append(f"{self._env.now:.1f} s: {decision.line()}")
            if decision.what == STAY:
                self._kept = gang
                return
        self._fleet.release(gang)

    def _moment(self, step: int, train_s: float, rollout_s: float) -> Moment:
        facts = self._rollout.facts()
        until = max(facts.admit_until, self._policy.admit_until(step, len(self._rollout.stale)))
        (since, completed), now, done = self._last, self._env.now, self._rollout.completed
        self._last = (now, done)
        in_flight = min(facts.running, facts.capacity or facts.running) // facts.samples_per_task
        flow = GroupFlow(
            ready=len(self._rollout.ready),
            wanted=self._policy.groups_per_step,
            supply=supply(replace(facts, admit_until=until), done),
            in_flight=max(1, in_flight),
            rate=(done - completed) / (now - since) if now > since else 0.0,
        )
        trainers = sum(len(rack.members) for rack in self._trainers)
        others = sum(len(rack.members) for rack in self._racks) - trainers
        wait = self._wait
        starved = facts.produced >= facts.admit_until * facts.samples_per_task
        return Moment(
            flow, max(0, wait.groups), wait.seconds, wait.called, train_s, rollout_s, starved, trainers, others
        )

    def _until_ready(self, began: float, wanted: int) -> Process:
        """Wait until the policy's trigger asks for an update that ``wanted`` groups make."""
        limit = min(self._given.batch_time_limit_s, MAX_STEP_S)
        self._env.process(self._remind(limit))
        while not self._update_is_due(began, wanted):
            if self._env.now - began > MAX_STEP_S:
                raise RuntimeError(f"{wanted} groups were not complete after {MAX_STEP_S:g} s")
            yield self._changed
        self._wait.complete_at = self._env.now

    def _update_is_due(self, began: float, wanted: int) -> bool:
        facts = RolloutFacts(
            ready=len(self._rollout.ready),
            wanted=wanted,
            waited_s=self._env.now - began,
            time_limit_s=self._given.batch_time_limit_s,
            serves=self._fleet.version,
            newest=self._fleet.version,
        )
        decision = self._policy.interrupt(facts)
        return decision is not None and decision.what == UPDATE

    def _until_synced(self) -> Process:
        while any(engine.version != self._fleet.version for engine in self._fleet.engines()) or self._fleet.syncing:
            yield self._fleet.synced

    def _train(self, gang: Gang, groups: Sequence[Group], fixed_s: float) -> Process:
        """Compute on ``groups``; a gang that is lost starts again. Returns the gang and the seconds it took."""
        seconds = fixed_s + self._train_s(gang.nodes, groups)
        while True:
            self._mark(gang, "train")
            done = self._env.timeout(seconds)
            yield done | gang.lost
            if not gang.lost.triggered:
                self._mark(gang, "train_idle")
                return gang, seconds
            yield self._env.timeout(self._given.cluster.failures.trainer_restart_s)
            gang = yield self._fleet.acquire(self._trainers)

    def _train_as_they_come(self, gang: Gang) -> Process:
        """Accumulate gradients over whatever is complete, until the batch is."""
        taken: list[Group] = []
        train_s = 0.0
        while missing := self._policy.groups_per_step - len(taken):
            if len(self._rollout.ready) >= part_of(missing):
                fresh = self._rollout.take(missing)
                self._wait.complete_at = self._env.now
                gang, seconds = yield from self._train(gang, fresh, 0.0)
                taken, train_s = taken + fresh, train_s + seconds
            else:
                since = self._env.now
                yield self._changed
                self._wait.seconds += self._env.now - since
        yield self._env.timeout(self._costs.train_fixed_s)
        return taken, gang, train_s + self._costs.train_fixed_s

    def _train_s(self, nodes: Sequence[SimulatedNode], groups: Sequence[Group]) -> float:
        """SPMD: equal shares, so the slowest kind of node decides."""
        tokens = sum(group.trained_tokens for group in groups)
        context = sum(group.squares for group in groups) / max(1.0, tokens)
        kinds = {id(node.kind): node for node in nodes}.values()
        slowest = max(self._service(node).train_s(tokens / len(nodes), context) for node in kinds)
        return slowest * (1 + self._costs.logprob_passes / roofline.TRAIN_PASSES)

    # Parts

    def _make_racks(self) -> list[Rack]:
        nodes = list(self._given.cluster.each())
        size = max(1, len(nodes) // POOL_NODES)
        racks = []
        for _, like in groupby(nodes, key=lambda node: (id(node.kind), node.tags)):
            members = list(like)
            racks += [self._rack(members[i : i + size]) for i in range(0, len(members), size)]
        return racks

    def _rack(self, members: Sequence[SimulatedNode]) -> Rack:
        engines, clocks = [], []
        for node in members:
            clock = NodeClock(node.id, self._segments if self._given.segments else None)
            clock.change(0.0, "train_idle")
            service = self._service(node)
            seats = min(self._given.cluster.max_running, int(service.kv_tokens / self._live_context))
            engines.append(
                Engine(self._env, node.id, service, seats, clock, self._rollout.turns_ended, self._rollout.put_back)
            )
            clocks.append(clock)
        return Rack(members, engines, clocks)

    def _service(self, node: SimulatedNode) -> Service:
        key = id(node.kind)
        if key not in self._services:
            kind = node.kind
            self._services[key] = Service(kind.device, self._given.model, kind.devices, kind.kv_tokens)
        return self._services[key]

    def _priority(self, node: SimulatedNode) -> float:
        return roofline.train_priority(node.kind.device, self._given.model)

    # Events

    def _tell(self) -> None:
        event, self._changed = self._changed, self._env.event()
        event.succeed()

    def _remind(self, seconds: float) -> Process:
        yield self._env.timeout(seconds + 1e-3)
        self._tell()

    def _mark(self, gang: Gang, activity: str) -> None:
        self._fleet.mark(gang.racks, activity)

    def _count_failure(self) -> None:
        self._failures += 1

    # Figures

    def _measure_from_now(self) -> None:
        self._began = self._env.now
        self._figures.clear()
        for clock in (clock for rack in self._racks for clock in rack.clocks):
            clock.restart(self._began)

    def _figures_of(self, step: int, groups: Sequence[Group], train_s: float, waited_s: float) -> StepFigures:
        tokens = sum(group.tokens for group in groups)
        written = sum(group.version_tokens for group in groups)
        return StepFigures(
            step=step,
            committed_at=self._env.now,
            groups=len(groups),
            samples=sum(group.samples for group in groups),
            tokens=tokens,
            staleness=step - written / tokens if tokens else 0.0,
            oldest=max(step - group.start_version for group in groups),
            train_s=train_s,
            waited_s=waited_s,
        )

    def _result(self, real_s: float) -> Result:
        seconds: dict[str, float] = {}
        for clock in (clock for rack in self._racks for clock in rack.clocks):
            clock.close(self._env.now)
            for activity, spent in clock.seconds.items():
                seconds[activity] = seconds.get(activity, 0.0) + spent
        trained = sum(step.samples for step in self._figures)
        stale = sum(group.samples for group in self._rollout.stale)
        return Result(
            pipeline=self._policy.name,
            nodes=self._given.cluster.size * self._given.stands_for,
            wall_s=self._env.now - self._began,
            seconds=seconds,  # type: ignore[arg-type]
            steps=self._figures,
            produced=self._rollout.produced,
            trained=trained,
            stale=stale,
            pending=self._rollout.pending,
            tokens_stale=sum(group.tokens for group in self._rollout.stale),
            switches=self._fleet.switches,
            failures=self._failures,
            segments=self._segments,
            decisions=self._decisions,
            policy=self._policy,
            stands_for=self._given.stands_for,
            real_s=real_s,
        )


def simulate(scenario: Scenario) -> Result:
    """Run one scenario. The same scenario gives the same result, to the last bit."""
    return Simulation(scenario).run()
