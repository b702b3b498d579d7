"""The pool's decisions, one transition at a time."""

from __future__ import annotations

from workflows.scheduling import pool as pools
from workflows.scheduling.pool import Demand, Fence, Grant, Node, Outcome, Pool, Revoke, Share
from workflows.scheduling.queueing import waiting


def node(name: str, *tags: str, priority: float | None = None, epoch: int = 0) -> Node:
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
    assert waiting(asked.pool) == {
        "r-gang": "2 nodes tagged 'train': 1 more must come; a is held by the run's own engine"
    }


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


def test_runs_that_keep_coming_with_a_higher_priority_do_not_starve_one_that_came_before() -> None:
    pool = pools.request(cluster(node("a", "train")), gang(1, run="first"), Share(priority=9)).pool
    pool = pools.request(pool, gang(1, run="patient")).pool
    for turn in range(pools.PATIENCE + 1):
        pool = pools.request(pool, gang(1, run=f"newcomer{turn}"), Share(priority=9)).pool
        pool = end(pool, "a").pool
    lease = pool.lease_of("a")
    assert lease is not None
    assert lease.run == "patient"
    assert pools.request(pool, gang(1, run="late"), Share(priority=9)).actions == []  # it is not taken away at once


def test_a_second_run_queues_behind_the_first_and_gets_its_nodes_when_that_ends() -> None:
    pool = pools.request(cluster(node("a", "rollout", "train"), node("b", "rollout")), engines("r1")).pool
    queued = pools.request(pool, engines("r2"))
    assert queued.actions == []
    assert waiting(queued.pool) == {
        "r2-engines": "a node tagged 'rollout': a is held by run r1 (engine, which is ahead); "
        "b is held by run r1 (engine, which is ahead)"
    }
    pool = pools.request(queued.pool, gang(1, run="r1")).pool
    pool = end(pool, "a").pool
    assert pool.lease_of("a").role == "trainer"  # type: ignore[union-attr]
    back = end(pool, "a")
    assert [action.lease.run for action in back.actions] == ["r1"]
    pool = pools.withdraw(back.pool, "r1-engines", "finished").pool
    assert [a.lease.run for node in ("a", "b") for a in end(pool, node).actions] == ["r2", "r2"]


def test_a_run_with_a_higher_priority_takes_the_nodes_of_one_with_a_lower() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines("r1")).pool
    asked = pools.request(pool, engines("r2"), Share(priority=1))
    assert kinds(asked) == [("revoke", ("a",))]
    assert [action.lease.run for action in end(asked.pool, "a").actions] == ["r2"]


def test_a_run_borrows_beyond_its_quota_what_nobody_wants_and_gives_it_back() -> None:
    nodes = [node(name, "rollout") for name in ("a", "b", "c")]
    pool = pools.request(cluster(*nodes), engines("r1"), Share(quota=1)).pool
    assert len(pool.leases) == 3
    asked = pools.request(pool, engines("r2"), Share(quota=1))
    assert len(asked.actions) == 1
    assert asked.actions[0].kind == "revoke"
    member = asked.actions[0].lease.members[0]
    assert [action.lease.run for action in end(asked.pool, member).actions] == ["r2"]


def test_a_run_at_its_quota_exchanges_roles_on_its_own_nodes() -> None:
    pool = cluster(node("a", "rollout", "train"), node("b", "rollout", "train"))
    pool = pools.request(pool, engines("r1"), Share(quota=1)).pool
    pool = pools.request(pool, engines("r2"), Share(quota=1)).pool
    mine = next(lease.members[0] for lease in pool.leases.values() if lease.run == "r1" and lease.state == "held")
    other = "b" if mine == "a" else "a"
    pool = end(pool, other).pool
    asked = pools.request(pool, gang(1, run="r1"))
    assert kinds(asked) == [("revoke", (mine,))]


def test_no_more_nodes_are_asked_back_than_a_run_may_claim() -> None:
    nodes = [node(name, "rollout", "train") for name in ("a", "b", "c", "d")]
    pool = pools.request(cluster(*nodes), engines("r1"), Share(quota=2)).pool
    asked = pools.request(pool, engines("r2"), Share(quota=1))
    assert [action.kind for action in asked.actions] == ["revoke"]
    again = pools.add_node(asked.pool, node("e", "reward"), now=1.0)
    assert again.actions == []
    wanted = pools.request(again.pool, gang(2, run="r1"))
    assert [action.kind for action in wanted.actions] == ["revoke", "revoke"]
    assert pools.add_node(wanted.pool, node("f", "reward"), now=2.0).actions == []


def test_what_a_person_set_for_a_run_outlives_its_requests() -> None:
    pool = pools.set_share(cluster(node("a", "rollout")), "r", priority=3, quota=2).pool
    pool = pools.request(pool, engines(), Share(priority=0)).pool
    assert (pool.share("r").priority, pool.share("r").quota) == (3, 2)


def test_nodes_are_found_by_what_they_can_do_and_by_what_they_do() -> None:
    pool = pools.request(
        cluster(node("a", "rollout", "train"), node("b", "train"), node("c", "reward")), engines()
    ).pool
    assert [n.id for n in pool.tagged("train")] == ["a", "b"]
    assert [n.id for n in pool.tagged("train", activity="free")] == ["b"]
    assert [n.id for n in pool.tagged("rollout", activity="rollout")] == ["a"]


def test_a_lease_on_a_machine_that_was_restarted_is_fenced() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    again = pools.add_node(pool, node("a", "rollout").model_copy(update={"boot_id": "b2"}), now=5.0)
    assert [type(action) for action in again.actions] == [Fence]


def test_a_lost_node_that_is_taken_back_into_service_by_hand_stays_lost_until_it_is_seen() -> None:
    pool = pools.drain(cluster(node("a", "rollout")), "a").pool
    pool = pools.node_lost(pool, "a", "power").pool
    pool = pools.drain(pool, "a", undo=True).pool
    assert pool.nodes["a"].health == "lost"
    assert pools.node_seen(pool, "a", "b1", 9.0).pool.nodes["a"].health == "up"


def test_a_measured_node_is_taken_for_training_by_its_profile_unless_the_run_file_says_otherwise() -> None:
    pool = cluster(node("a", "train"), node("b", "train"))
    pool = pools.profiled(pool, "b", 2.0).pool
    assert kinds(pools.request(pool, gang(1))) == [("grant", ("b",))]
    given = pools.add_node(pool, node("a", "train", priority=3.0), now=0.0).pool
    assert kinds(pools.request(given, gang(1))) == [("grant", ("a",))]


def test_every_node_knows_why_it_does_what_it_does() -> None:
    pool = pools.request(cluster(node("a", "rollout")), engines()).pool
    assert "first in the queue" in pool.nodes["a"].why
    assert "needs the room" in pools.drain(pool, "a", "ann needs the room").pool.nodes["a"].why
