"""What people and several runs do with one pool, on a real Temporal server."""

from __future__ import annotations

import asyncio

import pytest
from fake_world import FakeWorld, eventually

from activities.audit import AuditActivities
from workflows import calls
from workflows.messages import (
    AuditInput,
    DrainNode,
    LeaseRequest,
    NodeName,
    NodeProfiled,
    NodeRate,
    NodeSeen,
    PoolStatus,
    RunStatus,
    SetShare,
    SetTags,
)
from workflows.profile_node import ProfileInput
from workflows.queues import CONTROL_QUEUE


async def status_of(world: FakeWorld, run: str) -> RunStatus:
    return await world.client.get_workflow_handle(calls.run_id(run)).query("status", result_type=RunStatus)


async def until_waiting(world: FakeWorld, run: str, text: str) -> None:
    for _ in range(400):
        if text in (await status_of(world, run)).waiting_for:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"it waits for {(await status_of(world, run)).waiting_for!r}")


async def test_a_second_run_on_the_same_nodes_queues_by_name_and_runs_when_they_are_free(world: FakeWorld) -> None:
    world.claims_open.clear()
    first = await world.start()
    await world.until("wait for batch 0")
    second = f"{world.run}-second"
    await world.start(world.spec(run=second))
    await until_waiting(world, second, f"is held by run {world.run} (engine, which is ahead)")
    assert not (await status_of(world, second)).engines

    world.claims_open.set()
    assert (await first.result()).steps == 1
    for _ in range(400):
        if [engine.node for engine in (await status_of(world, second)).engines] == ["a", "b"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"it did not get the nodes: {await world.pool_status()}")


async def test_a_run_takes_no_more_than_its_quota_when_another_wants_the_rest(world: FakeWorld) -> None:
    world.claims_open.clear()
    await world.start(world.spec(pool={"quota": 1}))
    await world.until("wait for batch 0")
    await eventually(lambda: set(world.routes) == {"a", "b"}, "both nodes, as nobody else wants them")

    await world.start(world.spec(run=f"{world.run}-second", pool={"quota": 1}))
    for _ in range(400):
        status = await world.pool_status()
        if [share.holds for share in status.shares] == [1, 1]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"one node each was expected: {status.shares}")


async def test_a_persons_share_for_a_run_takes_nodes_from_one_that_came_before(world: FakeWorld) -> None:
    world.claims_open.clear()
    await world.start()
    await world.until("wait for batch 0")
    second = f"{world.run}-second"
    await world.start(world.spec(run=second))
    await until_waiting(world, second, "which is ahead")

    order = SetShare(run=second, priority=5, actor="ann", why="demo at noon")
    await world.pool().execute_update("set_share", order, result_type=PoolStatus)
    await until_waiting(world, world.run, f"held by run {second}")
    await world.until("audit set_share by ann")


async def test_a_node_that_is_tagged_while_a_run_lives_takes_part_and_the_command_is_audited(world: FakeWorld) -> None:
    world.claims_open.clear()
    await world.start()
    await world.until("wait for batch 0")
    order = SetTags(node="b", tags=frozenset({"reward"}), actor="ann")
    await world.pool().execute_update("set_tags", order)
    await world.until("park engine b")
    assert await world.pool().query("tagged", "rollout") == ["a"]
    for _ in range(400):  # the pool hears of the lease's end a moment after the engine is parked
        status = (await world.pool_status()).node("b")
        assert status is not None
        if status.activity == "free":
            break
        await asyncio.sleep(0.05)
    assert (status.activity, status.tags) == ("free", ("reward",))
    await world.until("audit set_tags by ann")


async def test_a_node_declared_dead_by_hand_is_fenced_and_comes_back_with_its_agent(world: FakeWorld) -> None:
    world.claims_open.clear()
    await world.start()
    await world.until("wait for batch 0")
    await world.pool().execute_update("lose_node", NodeName(node="b", actor="ann", why="smoke"))
    await eventually(lambda: "b" not in world.routes, "the route of b to close")
    lost = (await world.pool_status()).node("b")
    assert lost is not None
    assert lost.health == "lost"
    assert "smoke" in lost.why
    await world.add_node("b")
    await eventually(lambda: world.routes.get("b") == "open 0", "b to serve again")


async def test_a_removed_node_leaves_and_may_join_again(world: FakeWorld) -> None:
    world.claims_open.clear()
    await world.start()
    await world.until("wait for batch 0")
    await world.pool().execute_update("remove_node", NodeName(node="b", actor="ann"))
    await world.until("park engine b")
    for _ in range(400):
        if (await world.pool_status()).node("b") is None:
            break
        await asyncio.sleep(0.05)
    await world.add_node("b")
    await eventually(lambda: world.routes.get("b") == "open 0", "b to serve again")


async def test_a_measured_node_is_kept_in_the_books_and_ranked_for_training_by_its_profile(world: FakeWorld) -> None:
    task = ProfileInput(node="b", model="/model", pool=calls.pool_id(world.run))
    await world.client.execute_workflow(
        "ProfileNode", task, id=f"{world.run}/profile", task_queue=CONTROL_QUEUE, result_type=NodeProfiled
    )
    assert "profile of b saved" in world.log
    node = (await world.pool_status()).node("b")
    assert node is not None
    assert node.train_priority == 2.5
    assert [(rate.role, rate.predicted, rate.measured) for rate in node.rates] == [("decode", 900.0, None)]

    seen = NodeSeen(node="b", boot_id="boot", rates=(NodeRate(role="decode", predicted=800, measured=850, error=0.06),))
    await world.pool().signal("node_seen", seen)
    node = (await world.pool_status()).node("b")
    assert node is not None
    assert [rate.measured for rate in node.rates] == [850.0]


async def test_the_audit_withdraws_what_an_ended_owner_still_waits_for(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.pool().execute_update("drain", DrainNode(node="a"))
    await world.pool().execute_update("drain", DrainNode(node="b"))
    world.claims_open.clear()
    run = await world.start()
    await until_waiting(world, world.run, "a is draining")
    spec = world.spec()
    await run.terminate("gone")
    request = LeaseRequest(
        request_id="orphan",
        run=world.run,
        role="trainer",
        tag="train",
        candidates=("a",),
        count=1,
        priority=100,
        owner=calls.run_id(world.run),
        spec=spec,
    )
    await world.pool().signal("request", request)
    audit = AuditActivities(world.client)
    monkeypatch.setattr("activities.audit.beating", lambda work: work)
    for _ in range(100):
        await audit.audit_pool(AuditInput(pool=calls.pool_id(world.run)))
        if not (await world.pool_status()).requests:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a request without an owner is still in the queue")
