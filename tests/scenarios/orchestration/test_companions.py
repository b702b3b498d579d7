"""A reference with nodes of its own, on a real Temporal server, told by what a run asked of a fake world."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from fake_world import NODES, FakeWorld, eventually
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from cli.why import why_node
from storage.errors import ConfigError, GangLost
from workflows import calls
from workflows.messages import ColumnsTask, Command, NodeSeen, Pause, SetTags, StepStatus
from workflows.spec import RunSpec
from workflows.training_run import TrainingRun

OWN = {"kl": "k3", "kl_coefficient": 0.1, "reference_on": "own"}


def spec(world: FakeWorld, *references: str, algorithm: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Two steps on ``a`` and ``b``, with a reference on the nodes ``references``."""
    nodes = [{"id": node, "tags": sorted(tags)} for node, tags in NODES.items()]
    nodes += [{"id": node, "tags": ["reference"]} for node in references]
    settings = {"group_size": 2, "groups_per_step": 2, **OWN, **(algorithm or {})}
    return world.spec(**{"nodes": nodes, "algorithm": settings, "pipeline": {"steps": 2}, **changes})


def passes(world: FakeWorld, step: int) -> list[str]:
    """Where the reference began to compute a step's batch."""
    begun = f"reference of 0.{step} on "
    return [line.removeprefix(begun) for line in world.log if line.startswith(begun)]


async def test_the_reference_s_nodes_compute_each_batch_before_its_update_and_keep_their_lease(
    world: FakeWorld,
) -> None:
    async with world.joined("reference", "r"):
        result = await (await world.start(spec(world, "r"))).result()
    assert (result.steps, result.balanced) == (2, True)
    assert world.log.count("start reference on r") == 1
    for step in range(2):
        written = f"reference wrote 1/1 of m{step}"
        assert (
            world.position(f"claim 0.{step}") < world.position(written) < world.position(f"train 0.{step} on m{step}")
        )
        assert [ref.key for ref in world.columns[f"m{step}"]] == [f"m{step} 1/1"]
    await world.until("park reference r")
    assert "end processes on r" in world.log


async def test_rollout_goes_on_while_the_reference_computes_and_the_train_node_is_taken_when_it_is_done(
    world: FakeWorld,
) -> None:
    world.passes_open.clear()
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r"))
        await world.until("reference of 0.0 on r")
        assert set(world.routes) == {"a", "b"}
        node = (await world.pool_status()).node("r")
        assert node is not None
        assert node.activity == "reference"
        assert "computes reference log-probs for run" in why_node(await world.pool_status(), node)
        companions = (await world.status()).companions
        assert [(one.role, one.members, one.state) for one in companions] == [("reference", ("r",), "ready")]
        world.passes_open.set()
        await run.result()
    assert world.position("reference wrote 1/1 of m0") < world.position("park engine a")


async def test_several_nodes_share_each_batch(world: FakeWorld) -> None:
    async with world.joined("reference", "q", "r"):
        world.claims_open.clear()
        run = await world.start(spec(world, "q", "r"))
        await until_known(world, "q", "r")
        world.claims_open.set()
        await run.result()
    assert sorted(passes(world, 1)) == ["q", "r"]
    assert [ref.key for ref in world.columns["m1"]] == ["m1 1/2", "m1 2/2"]


async def test_a_node_that_is_lost_in_the_pass_is_fenced_and_another_computes_its_share(world: FakeWorld) -> None:
    world.passes_open.clear()
    async with world.joined("reference", "q", "r"):
        world.claims_open.clear()
        run = await world.start(spec(world, "q", "r"))
        await until_known(world, "q", "r")
        world.claims_open.set()
        await eventually(lambda: len(passes(world, 0)) == 2, "both to compute")
        await world.pool().signal("node_lost", NodeSeen(node="r", boot_id="boot"))
        await eventually_free(world, "r")
        world.passes_open.set()
        assert (await run.result()).steps == 2
    assert sorted(passes(world, 0)) == ["q", "q", "r"]
    assert len(world.columns["m0"]) == 2
    assert "rewind to lineage 1" not in world.log


async def test_ranks_that_die_in_the_pass_are_started_again_and_compute_it(world: FakeWorld) -> None:
    def die_once(task: ColumnsTask) -> None:
        if world.log.count("start reference on r") == 1:
            world.deaths["r"].set()
            raise GangLost("rank 0 was killed")

    world.on_pass = die_once
    async with world.joined("reference", "r"):
        assert (await (await world.start(spec(world, "r"))).result()).steps == 2
    assert world.log.count("start reference on r") == 2
    assert passes(world, 0) == ["r", "r"]


async def test_ranks_that_fail_but_live_lose_their_lease_and_the_pass_is_made_under_the_next(world: FakeWorld) -> None:
    def fail_once(task: ColumnsTask) -> None:
        if world.log.count("start reference on r") == 1:
            raise GangLost("this trainer has failed and must be restarted")

    world.on_pass = fail_once
    async with world.joined("reference", "r"):
        assert (await (await world.start(spec(world, "r"))).result()).steps == 2
    assert world.position("park reference r") < world.position("reference wrote 1/1 of m0")


async def test_a_node_is_re_tagged_to_the_reference_and_away_from_it(world: FakeWorld) -> None:
    world.claims_open.clear()
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r"))
        await world.until("start reference on r")
        await world.pool().execute_update("set_tags", SetTags(node="r", tags=frozenset({"reward"}), actor="ann"))
        await world.until("park reference r")
        world.claims_open.set()
        await world.until("claim 0.0")
        await eventually_waits(world, "reference")

        await world.pool().execute_update("set_tags", SetTags(node="b", tags=frozenset({"reference"}), actor="ann"))
        await world.until("start reference on b")
        assert (await run.result()).steps == 2
    assert passes(world, 0) == ["b"]


async def test_a_step_that_is_replayed_asks_again_and_the_reference_was_never_rewound(world: FakeWorld) -> None:
    def die_once(task: Any) -> None:
        if task.lineage == 0 and task.manifest.step == 1:
            world.rank_died.set()
            raise GangLost("rank 0 was killed")

    world.on_train = die_once
    async with world.joined("reference", "r"):
        assert (await (await world.start(spec(world, "r"))).result()).steps == 2
    assert "reference of 1.1 on r" in world.log
    assert world.log.count("start reference on r") == 1


async def test_parts_that_are_trained_ahead_of_their_batch_come_with_their_columns(world: FakeWorld) -> None:
    world.claims_open.clear()
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r", pipeline={"name": "off_policy", "accumulate": True, "steps": 1}))
        await world.until("accumulate part of 0")
        world.claims_open.set()
        await run.result()
    assert [ref.key for ref in world.columns["part of 0"]] == ["part of 0 1/1"]
    assert [ref.key for ref in world.columns["m0"]] == ["m0 1/1"]


async def test_a_pause_that_gives_back_frees_the_reference_s_node_too(world: FakeWorld) -> None:
    world.claims_open.clear()
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r"))
        await world.until("start reference on r")
        await run.execute_update(TrainingRun.pause, Pause(mode="drain", give_back=True))
        await world.until_free()
        await run.execute_update(TrainingRun.resume, Command())
        world.claims_open.set()
        assert (await run.result()).steps == 2


async def test_a_stop_now_ends_a_pass(world: FakeWorld) -> None:
    world.passes_open.clear()
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r"))
        await world.until("reference of 0.0 on r")
        await run.execute_update("stop", {"mode": "now"})
        assert (await run.result()).stopped
        await world.until_free()


async def test_a_reference_that_cannot_be_loaded_fails_the_run_with_its_message(world: FakeWorld) -> None:
    def refuse(task: ColumnsTask) -> None:
        raise ConfigError("algorithm.reference /models/none: no config.json there")

    world.on_pass = refuse
    async with world.joined("reference", "r"):
        run = await world.start(spec(world, "r"))
        with pytest.raises(WorkflowFailureError) as caught:
            await run.result()
    assert "algorithm.reference /models/none" in calls.reason_of(caught.value.cause)


async def until_known(world: FakeWorld, *nodes: str) -> None:
    """Wait until the first step knows that these are ready."""
    step = world.client.get_workflow_handle(calls.step_id(world.run, 0, 0))
    found: list[str] = []
    for _ in range(600):
        with contextlib.suppress(RPCError):  # it has not begun
            status = await step.query("status", result_type=StepStatus)
            found = sorted(node for one in status.companions if one.state == "ready" for node in one.members)
            if found == sorted(nodes):
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the step knows of {found}, not of {nodes}: {world.log}")


async def eventually_free(world: FakeWorld, node: str) -> None:
    for _ in range(400):
        status = (await world.pool_status()).node(node)
        if status is not None and status.lease is None:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"node {node} is not free: {await world.pool_status()}")


async def eventually_waits(world: FakeWorld, role: str) -> None:
    """The step says that it waits for a node with the tag, and the pool says why there is none."""
    for _ in range(400):
        step = await world.client.get_workflow_handle(calls.step_id(world.run, 0, 0)).query("status")
        waits = {r.role: r.waiting_for for r in (await world.pool_status()).requests}
        if f"a node with the tag {role!r}" in step["waiting_for"] and f"cannot {role}" in waits[role]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the step waits for {step['waiting_for']!r}, requests for {waits}")
