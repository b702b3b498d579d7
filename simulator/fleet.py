"""Who has which node: the real pool, whose actions are carried out on simulated nodes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from simulator.cluster import Costs, SimulatedNode
from simulator.engine import Engine
from simulator.measure import NodeClock
from simulator.rollout import Rollout
from workflows.scheduling import pool
from workflows.scheduling.pipeline import ENGINE_PRIORITY, TRAINER_PRIORITY

RUN = "run"
POOL_NODES = 64
"""A pool with more nodes than this is asked for racks of like nodes, which change their role together."""

Process = Generator[simpy.Event, Any, Any]


class Rack:
    """Like nodes that the pool knows as one: a single one, unless the cluster is large."""

    def __init__(self, members: Sequence[SimulatedNode], engines: Sequence[Engine], clocks: Sequence[NodeClock]):
        self.id = members[0].id
        self.members = members
        self.tags = members[0].tags
        self.engines = engines
        self.clocks = clocks
        self.up = True


class Gang:
    """A trainer lease; ``lost`` happens if one of its nodes is."""

    def __init__(self, env: simpy.Environment, lease: pool.Lease, racks: Sequence[Rack]) -> None:
        self.lease = lease
        self.racks = racks
        self.lost = env.event()

    @property
    def nodes(self) -> list[SimulatedNode]:
        return [node for rack in self.racks for node in rack.members]


class Fleet:
    """Applies pool transitions; engines start and stop, and the gang gets its nodes, as the pool says."""

    def __init__(
        self, env: simpy.Environment, racks: Sequence[Rack], priority: Callable[[SimulatedNode], float],
        rollout: Rollout, costs: Costs,
    ) -> None:  # fmt: skip
        self._env = env
        self._racks = {rack.id: rack for rack in racks}
        self._rollout = rollout
        self._costs = costs
        self._waiting: simpy.Event | None = None
        self._gang: Gang | None = None
        self._asked = 0
        self._started = False
        self._cold: set[str] = set()
        self.version = 0
        """Newest published weights."""
        self.switches = 0
        self.synced = env.event()
        """Happens when engines have come to serve other weights."""
        self.syncing = 0
        """Publications whose weights are still being loaded."""
        nodes = [
            pool.Node(id=rack.id, tags=rack.tags, train_priority=priority(rack.members[0]), boot_id="1")
            for rack in racks
        ]
        self.pool = pool.Pool(nodes={node.id: node for node in nodes})

    def want_engines(self, racks: Sequence[Rack]) -> None:
        """The standing demand of a run for engines on all of ``racks``, granted at once: the clock starts behind it."""
        candidates = frozenset(rack.id for rack in racks)
        demand = pool.Demand(
            request_id="engines", run=RUN, role="engine", tag="rollout", candidates=candidates,
            priority=ENGINE_PRIORITY,
        )  # fmt: skip
        self._apply(pool.request(self.pool, demand))
        self._started = True

    def acquire(self, racks: Sequence[Rack]) -> simpy.Event:
        """Ask for a gang of all of ``racks``; the event's value is the :class:`Gang`."""
        self._asked += 1
        self._waiting = self._env.event()
        waiting = self._waiting
        demand = pool.Demand(
            request_id=f"gang-{self._asked}", run=RUN, role="trainer", tag="train", count=len(racks),
            candidates=frozenset(rack.id for rack in racks), priority=TRAINER_PRIORITY,
        )  # fmt: skip
        self._apply(pool.request(self.pool, demand))
        return waiting

    def release(self, gang: Gang) -> None:
        """The update is made: its nodes go to whom the pool gives them."""
        self._gang = None
        self.mark(gang.racks, "train_idle")
        self._apply(pool.released(self.pool, gang.lease.id, gang.lease.epoch))

    def publish(self, version: int) -> None:
        """Every engine that serves takes the new weights: it decodes while they are brought, then stands still."""
        self.version = version
        self._env.process(self._sync(version))

    def engines(self) -> list[Engine]:
        """Those that serve."""
        return [engine for rack in self._racks.values() for engine in rack.engines if engine.serving]

    def lose(self, rack: Rack) -> None:
        rack.up = False
        self._cold.add(rack.id)
        self._apply(pool.node_lost(self.pool, rack.id, "it failed"))
        for clock in rack.clocks:
            clock.change(self._env.now, "down")

    def find_again(self, rack: Rack) -> None:
        rack.up = True
        for clock in rack.clocks:
            clock.change(self._env.now, "train_idle")
        self._apply(pool.node_seen(self.pool, rack.id, "1", self._env.now))

    # What the pool orders

    def _apply(self, outcome: pool.Outcome) -> None:
        self.pool = outcome.pool
        for action in outcome.actions:
            racks = [self._racks[node] for node in action.lease.members]
            if action.kind == "grant" and action.lease.role == "trainer":
                self._env.process(self._start_gang(action.lease, racks))
            elif action.kind == "grant":
                self._env.process(self._start_engine(action.lease, racks[0], self._start_s(racks[0])))
            elif action.lease.role == "trainer":
                self._end_gang(action.lease)
            else:
                self._env.process(self._park(action.lease, racks[0], dead=action.kind == "fence"))

    def _start_s(self, rack: Rack) -> float:
        if not self._started:
            return 0.0
        if rack.id not in self._cold:
            return self._costs.train_to_rollout_s
        self._cold.discard(rack.id)
        return self._costs.start_s

    def _start_engine(self, lease: pool.Lease, rack: Rack, seconds: float) -> Process:
        if seconds:
            self.mark([rack], "switch")
            yield self._env.timeout(seconds)
        held = self.pool.leases.get(lease.key)
        if held is None or held.state != "held":
            return
        for engine in rack.engines:
            engine.start(self.version)
            self._rollout.add(engine)
        self._happened()

    def _park(self, lease: pool.Lease, rack: Rack, *, dead: bool) -> Process:
        serving = [engine for engine in rack.engines if engine.serving]
        for engine in serving:
            self._rollout.take_back(engine, engine.stop())
        if not dead:
            self.mark([rack], "switch")
            yield self._env.timeout(self._costs.rollout_to_train_s)
        self._apply(pool.released(self.pool, lease.id, lease.epoch))

    def _start_gang(self, lease: pool.Lease, racks: Sequence[Rack]) -> Process:
        gang = self._gang = Gang(self._env, lease, racks)
        self.mark(racks, "train_idle")
        self.switches += 1
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.succeed(gang)
        yield self._env.timeout(0)

    def _end_gang(self, lease: pool.Lease) -> None:
        if self._gang is not None and self._gang.lease.key == lease.key:
            gang, self._gang = self._gang, None
            gang.lost.succeed()
        self._apply(pool.released(self.pool, lease.id, lease.epoch))

    def _sync(self, version: int) -> Process:
        stall = self._costs.stall
        self.syncing += 1
        yield self._env.timeout(self._costs.sync_s - stall)
        for engine in self.engines():
            if engine.version < version:
                engine.hold(stall, version)
        self._rollout.synced()
        yield self._env.timeout(stall)
        self.syncing -= 1
        self._happened()

    def _happened(self) -> None:
        event, self.synced = self.synced, self._env.event()
        event.succeed()

    def mark(self, racks: Sequence[Rack], activity: Any) -> None:
        for rack in racks:
            for clock in rack.clocks:
                if rack.up:
                    clock.change(self._env.now, activity)
