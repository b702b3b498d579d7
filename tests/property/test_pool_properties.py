"""Whatever happens to a pool: no node in two leases, epochs grow, nobody starves, revoked leases end."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workflows.scheduling import pool as pools
from workflows.scheduling.pool import Demand, Grant, Lease, Node, Outcome, Pool

NODES = ("a", "b", "c", "d")
TAGS = (frozenset({"rollout"}), frozenset({"train"}), frozenset({"rollout", "train"}))
names = st.sampled_from(NODES)


class PoolMachine(RuleBasedStateMachine):
    """Drives the pool as nodes, runs and people would; the world does what the actions say, later."""

    @initialize()
    def start(self) -> None:
        self.pool = Pool()
        self.living: dict[str, Lease] = {}
        self.highest: Counter[str] = Counter()
        self.serial = 0
        self.now = 0.0

    def apply(self, outcome: Outcome) -> None:
        self.pool = outcome.pool
        for action in outcome.actions:
            if isinstance(action, Grant):
                lease = action.lease
                for node in lease.members:
                    assert lease.epoch > self.highest[node], "an epoch did not grow"
                    self.highest[node] = lease.epoch
                self.living[lease.key] = lease
            else:
                assert action.lease.key in self.living, "an action for a lease that was never granted"

    @rule(node=names, tags=st.sampled_from(TAGS), epoch=st.integers(0, 3))
    def add_node(self, node: str, tags: frozenset[str], epoch: int) -> None:
        value = Node(id=node, tags=tags, boot_id="b", epoch=min(epoch, self.highest[node]))
        self.apply(pools.add_node(self.pool, value, self.now))

    @rule(node=names, tags=st.sampled_from(TAGS))
    def set_tags(self, node: str, tags: frozenset[str]) -> None:
        if node in self.pool.nodes:
            self.apply(pools.set_tags(self.pool, node, tags))

    @rule(node=names, hold=st.booleans())
    def preempt(self, node: str, hold: bool) -> None:
        if node in self.pool.nodes:
            self.apply(pools.preempt(self.pool, node, "by hand", hold=hold))

    @rule(node=names, undo=st.booleans())
    def drain(self, node: str, undo: bool) -> None:
        if node in self.pool.nodes:
            self.apply(pools.drain(self.pool, node, undo=undo))

    @rule(node=names)
    def lose(self, node: str) -> None:
        self.apply(pools.node_lost(self.pool, node, "power"))

    @rule(node=names)
    def seen(self, node: str) -> None:
        self.apply(pools.node_seen(self.pool, node, "b", self.now))

    @rule(count=st.one_of(st.none(), st.integers(1, 3)), priority=st.integers(0, 3))
    def ask(self, count: int | None, priority: int) -> None:
        self.serial += 1
        role, tag = ("engine", "rollout") if count is None else ("trainer", "train")
        demand = Demand(
            request_id=f"q{self.serial}", run=f"r{self.serial}", role=role, tag=tag, count=count, priority=priority
        )
        self.apply(pools.request(self.pool, demand))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.pool.demands:
            chosen = data.draw(st.sampled_from(sorted(self.pool.demands)))
            self.apply(pools.withdraw(self.pool, chosen, "changed its mind"))

    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        if self.living:
            self.end(data.draw(st.sampled_from(sorted(self.living))))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.apply(pools.tick(self.pool, self.now, lost_after=30.0))

    @rule()
    def everybody_gets_a_turn(self) -> None:
        """From here on leases only end, oldest first: every demand that fits somewhere is granted within bounds."""
        owed = {d.request_id for d in self.pool.demands.values() if self._possible(d)}
        granted = {lease.request_id for lease in self.living.values()}
        for _ in range(20 * (len(self.pool.demands) + 1) * (pools.PATIENCE + 1)):
            if owed <= granted or not self.living:
                break
            self.end(min(self.living, key=lambda key: self.living[key].epoch))
            granted |= {lease.request_id for lease in self.living.values()}
        assert owed <= granted, f"starved: {sorted(owed - granted)}"

    def _possible(self, demand: Demand) -> bool:
        fit = [n for n in self.pool.nodes.values() if n.health == "up" and demand.tag in n.tags]
        return len(fit) >= (demand.count or 1)

    def end(self, key: str) -> None:
        lease = self.living.pop(key)
        self.apply(pools.released(self.pool, lease.id, lease.epoch))

    @invariant()
    def no_node_is_in_two_leases(self) -> None:
        members = Counter(node for lease in self.pool.leases.values() for node in lease.members)
        assert not [node for node, count in members.items() if count > 1]

    @invariant()
    def the_pool_knows_exactly_the_leases_that_live(self) -> None:
        assert set(self.pool.leases) == set(self.living)

    @invariant()
    def a_gang_is_whole(self) -> None:
        for lease in self.pool.leases.values():
            demand = self.pool.demands.get(lease.request_id)
            if demand is not None and demand.count is not None:
                assert len(lease.members) == demand.count

    @invariant()
    def a_free_node_that_somebody_wants_alone_is_not_left_idle(self) -> None:
        gangs = any(d.count is not None for d in self.pool.demands.values())
        for demand in self.pool.demands.values():
            if demand.count is None and not gangs:
                for node in self.pool.nodes.values():
                    wanted = node.health == "up" and demand.tag in node.tags
                    assert not wanted or self.pool.lease_of(node.id) is not None


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
