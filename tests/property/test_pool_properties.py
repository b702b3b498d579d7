"""Whatever happens to a pool: no node in two leases, epochs grow, nobody starves, quotas hold, revoked leases end.

``POOL_SEQUENCES=5000`` tries that many sequences of events instead of a few hundred.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workflows.scheduling import pool_events as events
from workflows.scheduling.granting import over_quota
from workflows.scheduling.pool import Demand, Fence, Grant, Lease, Node, Pool, Revoke, Share
from workflows.scheduling.pool_events import Event
from workflows.scheduling.pool_state import SHARED_TAGS
from workflows.scheduling.queueing import waiting

NODES = ("a", "b", "c", "d")
RUNS = ("q", "r", "s")
ROLES = {"rollout": "engine", "train": "trainer", "reference": "reference", "critic": "critic", "reward": "scorer"}
TAGS = st.frozensets(st.sampled_from(sorted(ROLES)), min_size=1)
PRIORITIES = {"rollout": 10, "reference": 50, "critic": 100, "train": 100, "reward": 50}
names = st.sampled_from(NODES)
runs = st.sampled_from(RUNS)


class PoolMachine(RuleBasedStateMachine):
    """Drives the pool as nodes, runs and people would; the world does what the actions say, later."""

    @initialize(tags=st.lists(TAGS, min_size=len(NODES), max_size=len(NODES)))
    def start(self, tags: list[frozenset[str]]) -> None:
        self.pool = Pool()
        self.log: list[tuple[float, Event]] = []
        self.living: dict[str, Lease] = {}
        self.told_to_end: set[str] = set()
        self.highest: Counter[str] = Counter()
        self.serial = 0
        self.now = 0.0
        for name, value in zip(NODES, tags, strict=True):
            self.add_node(name, value, 0, "b")

    def happens(self, event: Event) -> None:
        self.log.append((self.now, event))
        outcome = events.apply(self.pool, event, self.now)
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
                assert isinstance(action, Fence | Revoke)
                self.told_to_end.add(action.lease.key)

    # Nodes and people

    @rule(node=names, tags=TAGS, epoch=st.integers(0, 3), boot=st.sampled_from("bbbc"))
    def add_node(self, node: str, tags: frozenset[str], epoch: int, boot: str) -> None:
        known = min(epoch, self.highest[node])
        self.happens(events.Added(node=Node(id=node, tags=tags, boot_id=boot, epoch=known)))

    @rule(node=names, tags=TAGS)
    def tag(self, node: str, tags: frozenset[str]) -> None:
        self.happens(events.Tagged(node=node, tags=tags))

    @rule(node=names, hold=st.booleans())
    def preempt(self, node: str, hold: bool) -> None:
        self.happens(events.Preempted(node=node, reason="by hand", hold=hold))

    @rule(node=names, undo=st.booleans())
    def drain(self, node: str, undo: bool) -> None:
        self.happens(events.Drained(node=node, reason="by hand", undo=undo))

    @rule(node=names)
    def remove(self, node: str) -> None:
        self.happens(events.Removed(node=node, reason="by hand"))

    @rule(node=names)
    def lose(self, node: str) -> None:
        self.happens(events.Lost(node=node, reason="power"))

    @rule(node=names, shares=st.frozensets(st.sampled_from(SHARED_TAGS)))
    def seen(self, node: str, shares: frozenset[str]) -> None:
        self.happens(events.Seen(node=node, boot_id="b", shares=shares))

    @rule(node=names, priority=st.floats(0, 3))
    def profiled(self, node: str, priority: float) -> None:
        self.happens(events.Profiled(node=node, train_priority=priority))

    @rule(run=runs, priority=st.integers(0, 2), quota=st.one_of(st.none(), st.integers(1, 3)))
    def share(self, run: str, priority: int, quota: int | None) -> None:
        self.happens(events.Shared(run=run, priority=priority, quota=quota))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.happens(events.Ticked(lost_after=30.0))

    # Runs

    @rule(
        run=runs,
        tag=st.sampled_from(sorted(ROLES)),
        count=st.one_of(st.none(), st.integers(1, 3)),
        quota=st.one_of(st.none(), st.integers(1, 3)),
        priority=st.integers(0, 2),
    )
    def ask(self, run: str, tag: str, count: int | None, quota: int | None, priority: int) -> None:
        self.serial += 1
        demand = Demand(
            request_id=f"x{self.serial}",
            run=run,
            role=ROLES[tag],
            tag=tag,
            count=count,
            priority=PRIORITIES[tag],
        )
        self.happens(events.Requested(demand=demand, share=Share(priority=priority, quota=quota)))

    @precondition(lambda self: self.pool.demands)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.pool.demands)))
        self.happens(events.Withdrawn(request_id=chosen, reason="changed its mind"))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.living))))

    def end(self, key: str) -> None:
        lease = self.living.pop(key)
        self.told_to_end.discard(key)
        self.happens(events.Released(lease=lease.id, epoch=lease.epoch))

    # Nobody starves

    @rule()
    def the_queue_moves_on(self) -> None:
        """Nobody comes any more; leases end, oldest first, and what was served goes: all that can be served is."""
        owed = {d.request_id for d in self.pool.demands.values() if self._possible(d)}
        for _ in range(10 * (len(owed) + len(self.living) + 1)):
            for request in sorted(owed & {lease.request_id for lease in self.living.values()}):
                self.happens(events.Withdrawn(request_id=request, reason="served"))
                owed.discard(request)
            if self.living:
                self.end(min(self.living, key=lambda key: self.living[key].epoch))
        assert not owed, f"starved: {sorted(owed)}; {waiting(self.pool)}"

    def _possible(self, demand: Demand) -> bool:
        fit = [n for n in self.pool.nodes.values() if n.health == "up" and demand.tag in n.tags]
        return len(fit) >= (demand.count or 1)

    # At all times

    @invariant()
    def no_node_is_in_two_leases(self) -> None:
        members = Counter(node for lease in self.pool.leases.values() for node in lease.members)
        assert not [node for node, count in members.items() if count > 1]

    @invariant()
    def the_pool_knows_exactly_the_leases_that_live(self) -> None:
        assert set(self.pool.leases) == set(self.living)

    @invariant()
    def a_lease_that_is_asked_back_was_told_so(self) -> None:
        asked = {key for key, lease in self.pool.leases.items() if lease.state == "revoking"}
        assert asked == self.told_to_end

    @invariant()
    def a_lease_on_a_node_that_may_not_work_is_asked_back(self) -> None:
        for lease in self.pool.leases.values():
            if lease.state == "held":
                nodes = [self.pool.nodes[name] for name in lease.members]
                assert all(node.health in ("up", "held") and lease.tag in node.tags for node in nodes)

    @invariant()
    def shared_work_is_asked_of_nodes_in_service_and_found_by_tag(self) -> None:
        for node in self.pool.nodes.values():
            wanted = set(self.pool.shared_work(node.id))
            assert wanted == (node.tags & set(SHARED_TAGS) if node.health == "up" else set())
            assert node.health != "lost" or not node.shares
            for tag in node.shares & node.tags:
                assert node in self.pool.tagged(tag, activity=tag)

    @invariant()
    def a_gang_is_whole(self) -> None:
        for lease in self.pool.leases.values():
            demand = self.pool.demands.get(lease.request_id)
            if demand is not None and demand.count is not None:
                assert len(lease.members) == demand.count

    @invariant()
    def what_is_beyond_a_quota_is_given_back_when_another_run_may_claim_it(self) -> None:
        for run in self.pool.shares:
            if over_quota(self.pool, run):
                lent = [x for x in self.pool.leases.values() if x.run == run and x.state == "held"]
                claims = [d for d in self.pool.demands.values() if d.run != run and self._may_claim_one(d)]
                for lease in lent:
                    for node in lease.members:
                        assert not [d for d in claims if self._wants(d, node)], f"{run} keeps {node}"

    def _may_claim_one(self, demand: Demand) -> bool:
        quota = self.pool.share(demand.run).quota
        own = {n for lease in self.pool.leases.values() if lease.run == demand.run for n in lease.members}
        waits = demand.count is None or (demand.count == 1 and not self.pool.leases_for(demand.request_id))
        revoking = any(lease.state == "revoking" for lease in self.pool.leases.values())
        return waits and not revoking and (quota is None or len(own) < quota)

    def _wants(self, demand: Demand, node: str) -> bool:
        value = self.pool.nodes[node]
        return value.health == "up" and demand.tag in value.tags

    @invariant()
    def a_free_node_that_somebody_wants_alone_is_not_left_idle(self) -> None:
        if any(d.count is not None for d in self.pool.demands.values()):
            return
        for demand in self.pool.demands.values():
            for node in self.pool.nodes.values():
                assert not self._wants(demand, node.id) or self.pool.lease_of(node.id) is not None

    @invariant()
    def every_wait_says_for_what(self) -> None:
        assert all(waiting(self.pool).values())

    def teardown(self) -> None:
        """The state is a function of the log, and survives being written and read."""
        if hasattr(self, "pool"):
            assert events.replay(self.log) == self.pool
            assert Pool.model_validate_json(self.pool.model_dump_json()) == self.pool


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=int(os.environ.get("POOL_SEQUENCES", "150")), stateful_step_count=30)
