"""A critic with nodes of its own, on a real Temporal server, told by what a run asked of a fake world."""

from __future__ import annotations

from typing import Any

import pytest
from fake_world import NODES, FakeWorld
from temporalio.client import WorkflowFailureError

from storage.errors import BadBatch, GangLost
from workflows import calls
from workflows.messages import NodeSeen, StateRef
from workflows.spec import RunSpec

PPO = {"name": "ppo", "critic_on": "own", "group_size": 2, "groups_per_step": 2}


def spec(world: FakeWorld, *critics: str, **changes: Any) -> RunSpec:
    """Two steps of PPO on ``a`` and ``b``, with its critic on ``critics``; only one of them, if none is named."""
    nodes = [{"id": node, "tags": sorted(tags)} for node, tags in NODES.items()]
    nodes += [{"id": node, "tags": ["critic"]} for node in critics or ("c",)]
    return world.spec(**{"nodes": nodes, "algorithm": PPO, "pipeline": {"steps": 2}, **changes})


def count(world: FakeWorld, beginning: str) -> int:
    return sum(line.startswith(beginning) for line in world.log)


async def test_values_come_before_the_update_and_the_critic_learns_before_both_are_committed(world: FakeWorld) -> None:
    async with world.joined("critic", "c"):
        result = await (await world.start(spec(world))).result()
    assert (result.steps, result.balanced) == (2, True)
    for step in range(2):
        order = [
            f"claim 0.{step}",
            f"critic wrote 1/1 of m{step}",
            f"train 0.{step} on m{step}",
            f"critic learns 0.{step} from critic, return",
            f"commit 0.{step}",
        ]
        assert sorted(order, key=world.position) == order
    assert world.checkpoint.critic == StateRef(path="/critic1", digest="cc")
    assert count(world, "start critic") == 1
    assert [c.name for c in world.columns["m1"]] == ["critic"]


async def test_a_critic_whose_ranks_die_in_its_update_starts_from_the_committed_state_and_makes_it_again(
    world: FakeWorld,
) -> None:
    def die_once(task: Any) -> None:
        if task.manifest.step == 1 and count(world, "critic learns 0.1") == 1:
            world.deaths["c"].set()
            raise GangLost("rank 0 was killed")

    world.on_critic = die_once
    async with world.joined("critic", "c"):
        assert (await (await world.start(spec(world))).result()).steps == 2
    learns, again = "critic learns 0.1 from critic, return", "start critic on c at 1 from /critic0"
    assert world.position(learns) < world.position(again)
    assert count(world, "critic learns 0.1") == 2
    assert count(world, "train 0.1") == count(world, "commit 0.1") == 1
    assert "rewind to lineage 1" not in world.log


async def test_a_trainer_that_is_lost_is_rewound_and_a_critic_that_had_not_learnt_stays(world: FakeWorld) -> None:
    def die_once(task: Any) -> None:
        if task.lineage == 0 and task.manifest.step == 1:
            world.rank_died.set()
            raise GangLost("rank 0 was killed")

    world.on_train = die_once
    async with world.joined("critic", "c"):
        assert (await (await world.start(spec(world))).result()).steps == 2
    assert world.position("rewind to lineage 1") < world.position("critic learns 1.1 from critic, return")
    assert count(world, "start critic") == 1


async def test_what_was_learnt_but_not_committed_is_rewound_with_the_policy(world: FakeWorld) -> None:
    world.halt_at = "begin commit 0.1"
    async with world.joined("critic", "c"):
        await world.start(spec(world))
        await world.until(world.halt_at)
        world.halt_at = ""
        for workflow in (calls.step_id(world.run, 0, 1), calls.run_id(world.run)):
            await world.client.get_workflow_handle(workflow).terminate("power loss")
        world.gang = None  # the trainer's ranks are gone with it, the critic's live on and have made step 1
        assert world.critic is not None
        assert world.critic[1] == 2

        run = await world.start(spec(world))
        assert (await run.result()).steps == 2
    assert "commit 0.1" not in world.log
    order = [
        "rewind to lineage 1",
        "start critic on c at 1 from /critic0",
        "critic learns 1.1 from critic, return",
        "commit 1.1",
    ]
    assert sorted(order, key=world.position) == order


async def test_a_critic_s_node_that_is_lost_is_replaced_by_another_from_the_committed_state(world: FakeWorld) -> None:
    async with world.joined("critic", "c"):
        world.halt_at = "critic of 0.1 on c"
        run = await world.start(spec(world, pool={"nodes": "any"}))
        await world.until(world.halt_at)
        async with world.joined("critic", "d"):
            world.critic = None  # its ranks are gone with it
            await world.pool().signal("node_lost", NodeSeen(node="c", boot_id="boot"))
            await world.until("start critic on d at 1 from /critic0")
            world.halt_at = ""
            world.go_on.set()
            assert (await run.result()).steps == 2
    assert "critic of 0.1 on d" in world.log
    assert "rewind to lineage 1" not in world.log


async def test_a_batch_that_the_critic_cannot_learn_from_stops_the_run_and_nothing_of_it_is_committed(
    world: FakeWorld,
) -> None:
    def refuse(task: Any) -> None:
        raise BadBatch("the critic's loss, nan, is not finite")

    world.on_critic = refuse
    async with world.joined("critic", "c"):
        run = await world.start(spec(world))
        with pytest.raises(WorkflowFailureError) as caught:
            await run.result()
    assert "the critic's loss, nan" in calls.reason_of(caught.value.cause)
    assert count(world, "commit") == 0
    assert "finish failed" in world.log


async def test_a_gang_of_two_nodes_is_the_critic_s_and_both_take_part(world: FakeWorld) -> None:
    async with world.joined("critic", "c", "d"):
        assert (await (await world.start(spec(world, "c", "d"))).result()).steps == 2
    for node in ("c", "d"):
        assert f"critic of 0.0 on {node}" in world.log
