"""The pool's decisions, one transition at a time."""

from __future__ import annotations

from workflows.scheduling import pool as pools
from workflows.scheduling.pool import Demand, Fence, Grant, Node, Outcome, Pool, Revoke


def node(name: str, *tags: str, priority: float = 0.0, epoch: int = 0) -> Node:
    return Node(id=name, tags=frozenset(tags), train_priority=priority, boot_id="b1", epoch=epoch)


def cluster(*nodes: Node) -> Pool:
    pool = Pool()
    for value in nodes:
        pool = pools.add_node(pool, value, now=0.0).pool
    return pool


def engines(run: str = "r", priority: int = 10) -> Demand:
    return Demand(request_id=f"{run}-engines", run=run, role="engine", tag="rollout", priority=priority)


def gang(count: int, run: str = "r", priority: int = 100, request_id: str = "") -> Demand:
    name = request_id or f"{run}-gang"
    return Demand(request_id=name, run=run, role="trainer", tag="train", count=count, priority=priority)


def kinds(outcome: Outcome) -> list[tuple[str, tuple[str, ...]]]:
    return [(action.kind, action.lease.members) for action in outcome.actions]


def end(pool: Pool, member: str) -> Outcome:
    lease = pool.lease_of(member)
    assert lease is not None
    return pools.released(pool, lease.id, lease.epoch)


def test_a_standing_demand_gets_every_node_with_its_tag_also_those_that_come_later() -> None:
    first = pools.request(cluster(node("a", "rollout"), node("b", "train")), engines())
    assert kinds(first) == [("grant", ("a",))]
    later = pools.add_node(first.pool, node("c", "rollout"), now=1.0)
    assert kinds(later) == [("grant", ("c",))]


def test_a_run_that_asks_anew_gets_the_nodes_of_its_old_demand() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    again = pools.request(pool, engines().model_copy(update={"request_id": "r-engines-2"}))
    assert kinds(again) == [("revoke", ("a",))]
    granted = end(again.pool, "a")
    assert kinds(granted) == [("grant", ("a",))]
    assert [lease.request_id for lease in granted.pool.leases.values()] == ["r-engines-2"]
    assert list(granted.pool.demands) == ["r-engines-2"]


def test_a_drained_or_held_node_stays_away_when_it_was_lost_and_is_found_again() -> None:
    pool = cluster(node("a", "rollout"), node("b", "rollout"), node("c", "rollout"))
    pool = pools.drain(pool, "a").pool
    pool = pools.preempt(pool, "b", "mine", hold=True).pool
    for name in ("a", "b", "c"):
        pool = pools.node_lost(pool, name, "power").pool
    pool = pools.node_seen(pool, "a", "b1", now=1.0).pool
    pool = pools.add_node(pool, node("b", "rollout"), now=1.0).pool
    pool = pools.node_seen(pool, "c", "b1", now=1.0).pool
    assert [pool.nodes[name].health for name in ("a", "b", "c")] == ["draining", "held", "up"]
    assert kinds(pools.request(pool, engines())) == [("grant", ("c",))]


def test_a_gang_revokes_lower_leases_and_is_granted_when_all_of_them_have_ended() -> None:
    pool = cluster(node("a", "rollout", "train"), node("b", "rollout", "train"), node("c", "rollout"))
    pool = pools.request(pool, engines()).pool
    asked = pools.request(pool, gang(2))
    assert kinds(asked) == [("revoke", ("a",)), ("revoke", ("b",))]

    one = end(asked.pool, "a")
    assert kinds(one) == []
    both = end(one.pool, "b")
    assert kinds(both) == [("grant", ("a", "b"))]
    assert both.pool.lease_of("c") is not None

    after = end(both.pool, "a")
    assert kinds(after) == [("grant", ("a",)), ("grant", ("b",))]


def test_nodes_are_taken_for_training_in_the_order_of_their_priority() -> None:
    pool = cluster(node("a", "train"), node("b", "train", priority=2.0), node("c", "train", priority=1.0))
    granted = pools.request(pool, gang(2)).actions[0]
    assert granted.lease.members == ("b", "c")


def test_a_gang_that_cannot_be_complete_takes_nothing() -> None:
    pool = pools.request(cluster(node("a", "rollout", "train")), engines()).pool
    asked = pools.request(pool, gang(2))
    assert asked.actions == []
    assert pools.waiting(asked.pool) == ["r-gang: 2 node(s) with tag 'train'; fit: a; busy: a (r-engine-a/1)"]


def test_the_epoch_of_a_lease_is_above_every_epoch_of_its_members() -> None:
    granted = pools.request(cluster(node("a", "train", epoch=7), node("b", "train", epoch=3)), gang(2))
    assert granted.actions[0].lease.epoch == 8
    assert {n.epoch for n in granted.pool.nodes.values()} == {8}


def test_an_agent_that_registers_again_keeps_its_lease_and_its_epoch() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    again = pools.add_node(pool, node("a", "rollout", epoch=0), now=5.0)
    assert again.actions == []
    assert again.pool.nodes["a"].epoch == 1
    assert again.pool.lease_of("a") is not None


def test_a_preempted_node_goes_to_whoever_waits_and_a_held_one_to_nobody() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    taken = pools.preempt(pool, "a", "by hand")
    assert kinds(taken) == [("revoke", ("a",))]
    assert kinds(end(taken.pool, "a")) == [("grant", ("a",))]

    held = pools.preempt(pool, "a", "by hand", hold=True).pool
    free = end(held, "a")
    assert free.actions == []
    assert kinds(pools.set_tags(free.pool, "a", frozenset({"rollout"}))) == [("grant", ("a",))]


def test_a_lease_whose_tag_is_taken_from_its_node_is_revoked() -> None:
    pool = pools.request(cluster(node("a", "rollout", "train")), engines()).pool
    assert kinds(pools.set_tags(pool, "a", frozenset({"train"}))) == [("revoke", ("a",))]
    assert kinds(pools.set_tags(pool, "a", frozenset({"rollout"}))) == []


def test_a_removed_node_is_forgotten_once_it_is_free() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    leaving = pools.remove_node(pool, "a")
    assert kinds(leaving) == [("revoke", ("a",))]
    assert "a" in leaving.pool.nodes
    assert "a" not in end(leaving.pool, "a").pool.nodes


def test_a_silent_node_is_fenced_and_comes_back_when_it_is_seen() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    pool = pools.tick(pool, 10.0, lost_after=30.0).pool
    lost = pools.tick(pool, 35.0, lost_after=30.0)
    assert [type(action) for action in lost.actions] == [Fence]
    ended = end(lost.pool, "a")
    assert ended.actions == []
    assert kinds(pools.node_seen(ended.pool, "a", "b1", 40.0)) == [("grant", ("a",))]


def test_silence_while_the_pool_itself_was_away_proves_nothing() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    pool = pools.tick(pool, 10.0, lost_after=30.0).pool
    assert pools.tick(pool, 500.0, lost_after=30.0).actions == []


def test_the_same_request_twice_is_one_request() -> None:
    pool = pools.request(cluster(node("a", "train")), gang(1)).pool
    assert pools.request(pool, gang(1)).actions == []
    done = end(pool, "a").pool
    assert pools.request(done, gang(1)).actions == []


def test_a_withdrawn_request_loses_its_leases_and_gets_none_again() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    gone = pools.withdraw(pool, "r-engines", "the run has ended")
    assert [(type(a), a.lease.members) for a in gone.actions] == [(Revoke, ("a",))]
    assert end(gone.pool, "a").actions == []


def test_a_demand_that_was_passed_over_often_goes_first_whatever_its_priority() -> None:
    pool = cluster(node("a", "rollout", "train"))
    pool = pools.request(pool, gang(1, request_id="g0")).pool
    pool = pools.request(pool, engines()).pool
    for turn in range(1, pools.PATIENCE + 2):
        pool = pools.request(pool, gang(1, request_id=f"g{turn}")).pool
        outcome = end(pool, "a")
        pool = outcome.pool
        granted = [action for action in outcome.actions if isinstance(action, Grant)]
        if granted[0].lease.role == "engine":
            return
    raise AssertionError("the engine never got its turn")
