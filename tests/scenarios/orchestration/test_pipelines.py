"""The five pipelines, and every trigger of the rollout manager, on a real Temporal server with a fake world."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_world import FakeWorld, eventually

from workflows import calls
from workflows.messages import FlowView, NodeSeen, Revoke, SetTags
from workflows.spec import RunSpec


def run_file(world: FakeWorld, name: str, steps: int = 3, accumulate: bool = False, **changes: Any) -> RunSpec:
    pipeline = {"name": name, "steps": steps, "accumulate": accumulate}
    return world.spec(pipeline=pipeline, data={"path": "/tasks.jsonl"}, **changes)


def ranks(world: FakeWorld) -> list[str]:
    return [line for line in world.log if "ranks at" in line]


async def until_route(world: FakeWorld, node: str, route: str) -> None:
    await eventually(lambda: world.routes.get(node) == route, f"route {route!r} of node {node}")


@pytest.mark.parametrize("name", ["disaggregated", "micro_batch", "off_policy"])
async def test_train_nodes_of_their_own_never_roll_out_and_keep_their_gang_between_steps(
    world: FakeWorld, name: str
) -> None:
    result = await (await world.start(run_file(world, name))).result()
    assert (result.steps, result.balanced) == (3, True)
    assert not [line for line in world.log if line.startswith("route a")]
    assert ranks(world) == ["attach ranks at 0"], "one lease for all steps"
    for step in range(3):
        assert world.position(f"claim 0.{step}") < world.position(f"train 0.{step} on m{step}")
    await world.until_free()


@pytest.mark.parametrize("name", ["off_policy", "multiplexed"])
async def test_rollout_goes_on_while_an_update_is_made(world: FakeWorld, name: str) -> None:
    world.leftover = 5
    world.training_open.clear()
    run = await world.start(run_file(world, name, 1))
    await world.until("train 0.0 on m0")
    assert world.routes == {"b": "open 0"}
    world.training_open.set()
    assert (await run.result()).steps == 1
    assert "hold b True" not in world.log


@pytest.mark.parametrize("name", ["colocated", "disaggregated"])
async def test_what_still_runs_is_held_while_an_update_is_made(world: FakeWorld, name: str) -> None:
    world.leftover = 5
    world.training_open.clear()
    run = await world.start(run_file(world, name, 1))
    await world.until("hold b True")
    assert "b" not in world.routes
    world.training_open.set()
    await world.until("hold b False")
    assert (await run.result()).steps == 1


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "micro_batch"])
async def test_on_policy_a_batch_begins_when_every_engine_serves_the_new_weights(world: FakeWorld, name: str) -> None:
    await (await world.start(run_file(world, name, 2))).result()
    assert world.admitted == [2, 4]
    for node in ("a", "b") if name == "colocated" else ("b",):
        assert world.position(f"route {node} open 1") < world.position("wait for batch 1")


async def test_groups_are_accumulated_before_their_batch_is_whole(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start(run_file(world, "micro_batch", 1))
    await world.until("accumulate part of 0")
    assert "train 0.0 on m0" not in world.log
    world.claims_open.set()
    assert (await run.result()).steps == 1
    assert world.position("accumulate part of 0") < world.position("claim 0.0") < world.position("train 0.0 on m0")


async def test_the_next_part_is_looked_for_while_the_one_before_it_is_computed(world: FakeWorld) -> None:
    world.claims_open.clear()
    world.accumulating_open.clear()
    run = await world.start(run_file(world, "micro_batch", 1))
    await world.until("accumulate part of 0")
    await world.until("look for a part of 0 beside [0]")
    world.claims_open.set()
    world.accumulating_open.set()
    assert (await run.result()).steps == 1
    assert world.log.count("accumulate part of 0") == 1


async def test_shared_nodes_roll_out_until_enough_groups_are_complete_and_then_accumulate_them(
    world: FakeWorld,
) -> None:
    world.claims_open.clear()
    world.parts_open.clear()
    run = await world.start(run_file(world, "multiplexed", 1, accumulate=True))
    await world.until("wait for batch 0")
    await until_route(world, "a", "open 0")
    assert world.least == [1], "half of two groups"
    world.parts_open.set()
    await world.until("accumulate part of 0")
    assert world.routes == {"b": "open 0"}, "the others go on"
    await eventually(lambda: world.preferred[0] == (0,), "the batch holds what is accumulated")
    world.claims_open.set()
    assert (await run.result()).steps == 1
    assert world.position("accumulate part of 0") < world.position("claim 0.0") < world.position("train 0.0 on m0")


async def test_a_batch_that_is_whole_before_nodes_are_called_is_trained_at_once(world: FakeWorld) -> None:
    world.parts_open.clear()
    result = await (await world.start(run_file(world, "multiplexed", 2, accumulate=True))).result()
    assert (result.steps, result.balanced) == (2, True)
    assert not [line for line in world.log if line.startswith("accumulate")]


async def test_nodes_that_are_all_that_roll_out_are_not_called_before_their_batch_is_whole(world: FakeWorld) -> None:
    nodes = [{"id": "a", "tags": ["rollout", "train"]}]
    world.parts_open.clear()
    spec = run_file(world, "multiplexed", 1, accumulate=True, nodes=nodes)
    assert (await (await world.start(spec)).result()).steps == 1
    assert world.least == [2]


async def test_nodes_stay_with_the_trainer_when_going_back_would_not_pay(world: FakeWorld) -> None:
    world.flow = FlowView(ready=2, wanted=2, supply=2, in_flight=2, rate=1.0)
    await (await world.start(run_file(world, "multiplexed"))).result()
    assert ranks(world) == ["attach ranks at 0"]
    assert not {"route a open 1", "route a open 2"} & set(world.log), "the next batch was complete already"


async def test_nodes_that_stayed_for_a_batch_that_is_late_roll_out_after_all(world: FakeWorld) -> None:
    world.flow = FlowView(ready=2, wanted=2, supply=2, in_flight=2, rate=1.0)
    world.on_train = lambda _: world.claims_open.clear()
    run = await world.start(run_file(world, "multiplexed", 2))
    await world.until("route a open 1")
    world.claims_open.set()
    assert (await run.result()).steps == 2
    assert ranks(world) == ["attach ranks at 0", "attach ranks at 1"]


async def test_what_a_change_of_roles_costs_and_gains_is_measured_and_told(world: FakeWorld) -> None:
    world.flow = FlowView(ready=0, wanted=2, supply=2, in_flight=2, rate=0.01)
    run = await world.start(run_file(world, "multiplexed"))
    await world.until("train 0.1 on m1")
    world.training_open.clear()
    await world.until("train 0.2 on m2")
    async with asyncio.timeout(60):  # the engines take the weights of the step before while this one is trained
        while not (status := await world.status()).switch_cost.weights:  # noqa: ASYNC110 - it tells no one
            await asyncio.sleep(0.05)
    world.training_open.set()
    await run.result()
    assert status.switch_cost.release
    assert status.switch_cost.load
    back = [record for record in status.switches if "until the next batch" in record.decision.why]
    assert [record.step for record in back] == [1, 2]
    assert {record.decision.what for record in back} == {"switch"}
    assert back[0].decision.predicted_gain_s is not None
    assert back[0].measured_gain_s is not None
    assert ranks(world) == ["attach ranks at 0", "attach ranks at 1", "attach ranks at 2"]


async def test_a_run_that_is_started_again_takes_the_gang_that_it_had_kept(world: FakeWorld) -> None:
    run = await world.start(run_file(world, "off_policy"))
    await world.until("commit 0.0")
    await run.terminate("a slip of the hand")
    again = await world.start(run_file(world, "off_policy"))
    assert (await again.result()).balanced
    await world.until_free()


async def test_a_run_ends_in_order_when_the_data_does(world: FakeWorld) -> None:
    world.data_end = 2
    result = await (await world.start(run_file(world, "multiplexed", 9))).result()
    assert (result.steps, result.stopped) == (2, False)
    assert "finish finished" in world.log


async def test_a_tag_that_is_taken_away_interrupts_rollout_and_its_return_resumes_it(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start(run_file(world, "multiplexed", 1))
    await world.until("wait for batch 0")
    await world.pool().execute_update("set_tags", SetTags(node="b", tags=frozenset({"reward"})))
    await world.until("park engine b")
    assert world.routes == {"a": "open 0"}
    await world.pool().execute_update("set_tags", SetTags(node="b", tags=frozenset({"rollout"})))
    await until_route(world, "b", "open 0")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_rollout_resumes_on_a_node_that_is_back(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start(run_file(world, "multiplexed", 1))
    await world.until("wait for batch 0")
    await world.pool().signal("node_lost", NodeSeen(node="b", boot_id="boot"))
    await world.until("route b closed")
    await world.pool().signal("node_seen", NodeSeen(node="b", boot_id="boot"))
    await until_route(world, "b", "open 0")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_gang_that_is_taken_between_two_steps_is_asked_for_again(world: FakeWorld) -> None:
    run = await world.start(run_file(world, "off_policy", 3))
    await world.until("commit 0.0")
    for lease in (await world.pool_status()).leases:
        if lease.role == "trainer":
            handle = world.client.get_workflow_handle(calls.lease_id(lease.lease, lease.epoch))
            await handle.signal("revoke", Revoke(reason="somebody else needs it"))
    assert (await run.result()).steps == 3
    assert len(ranks(world)) == 2
