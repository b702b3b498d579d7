"""Held-out tasks are judged beside training: no step waits, and the weights that are judged stay where they are."""

from __future__ import annotations

from fake_world import FakeWorld, eventually

from workflows.messages import PreemptNode


async def test_steps_go_on_while_an_engine_keeps_the_weights_that_are_judged(world: FakeWorld) -> None:
    run = await world.start(world.spec(pipeline={"steps": 3}, evaluation={"every": 1}))
    await world.until("evaluated 0")
    world.evaluations_open.clear()
    await world.until("commit 0.1")
    assert "evaluated 1" not in world.log
    assert "begin load 2 on b" not in world.log
    world.evaluations_open.set()
    result = await run.result()
    assert (result.steps, result.reward_after) == (3, 0.75)
    assert world.position("evaluated 1") < world.position("load 3 on b")


async def test_an_engine_on_a_node_that_the_run_file_does_not_name_is_spared_too(world: FakeWorld) -> None:
    named = [{"id": "a", "tags": ["rollout", "train"]}]
    spec = world.spec(nodes=named, pool={"nodes": "any"}, pipeline={"steps": 2}, evaluation={"every": 1})
    run = await world.start(spec)
    await world.until("evaluated 0")
    world.evaluations_open.clear()
    await world.until("commit 0.1")
    assert "begin load 2 on b" not in world.log
    world.evaluations_open.set()
    assert (await run.result()).steps == 2


async def test_an_evaluation_is_missing_once_no_engine_can_have_its_weights_any_more(world: FakeWorld) -> None:
    run = await world.start(world.spec(pipeline={"steps": 2}, evaluation={"every": 1}))
    await world.until("evaluated 0")
    world.evaluations_open.clear()
    await world.until("commit 0.0")
    world.claims_open.clear()
    await eventually(lambda: any(line.startswith("evaluate 1") for line in world.log), "the evaluation of version 1")
    await world.pool().execute_update("preempt", PreemptNode(node="b", reason="I need it", hold=True))
    await world.until("park engine b")
    world.claims_open.set()
    await world.until("park stream eval/1")
    world.evaluations_open.set()
    result = await run.result()
    status = await world.status()
    assert [e.version for e in status.evaluations] == [0, 2]
    assert result.steps == 2
