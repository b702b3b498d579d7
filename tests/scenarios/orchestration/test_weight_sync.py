"""New weights reach every engine, or none of its agents: what a lease and a run do when one node's load goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from fake_world import FakeWorld, eventually
from temporalio.client import WorkflowFailureError

from storage.errors import EngineRejected, IntegrityError
from workflows import calls, engine_lease, run_evaluation
from workflows.messages import EngineTask, NodeSeen, PreemptNode
from workflows.spec import RunSpec

Load = Callable[[EngineTask], Awaitable[None]]


def on(node: str, version: int, fault: Load) -> Load:
    """A fault of one node's load of one version."""

    async def load(task: EngineTask) -> None:
        if (task.node, task.weights.version) == (node, version):
            await fault(task)

    return load


async def hang(task: EngineTask) -> None:
    await asyncio.Event().wait()


def limited(world: FakeWorld, **changes: Any) -> RunSpec:
    """A run whose engines have a second for a load."""
    return world.spec(engine={"kind": "scripted", "load_limit_s": 1}, **changes)


def routes_of(world: FakeWorld, node: str) -> list[str]:
    return [line.removeprefix(f"route {node} ") for line in world.log if line.startswith(f"route {node} ")]


async def test_a_slow_load_holds_back_its_own_node_only(world: FakeWorld) -> None:
    loaded = asyncio.Event()

    async def slowly(task: EngineTask) -> None:
        await loaded.wait()

    world.on_load = on("b", 1, slowly)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    await world.until("claim 0.0")
    world.claims_open.clear()
    await world.until("begin load 1 on b")
    await world.until("route a open 1")
    await world.until("wait for batch 1")
    assert world.routes["b"] == "held 0"

    world.claims_open.set()
    loaded.set()
    assert (await run.result()).version == 2
    assert "open 0" not in routes_of(world, "b")[1:]


async def test_an_engine_that_misses_its_deadline_is_waited_for_no_longer(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_lease, "LOAD_SLACK_S", 0.0)
    world.on_load = on("b", 1, hang)
    result = await (await world.start(limited(world))).result()
    assert result.reward_after == 0.25
    assert world.position("route b closed") < world.position("evaluate 1 on [1]")
    assert routes_of(world, "b") == ["open 0", "held 0", "closed"]


async def test_an_engine_that_could_not_load_gets_no_work_until_it_serves_the_newest_weights(world: FakeWorld) -> None:
    async def refuse(task: EngineTask) -> None:
        raise EngineRejected("of another model")

    world.on_load = on("b", 1, refuse)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    assert (await run.result()).version == 2
    assert routes_of(world, "b") == ["open 0", "held 0", "closed", "open 2", "closed"]


async def test_a_load_that_failed_is_tried_again_and_its_reason_is_shown(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_lease, "RETRY_LOAD", timedelta(seconds=0.3))
    healed = asyncio.Event()

    async def until_healed(task: EngineTask) -> None:
        if not healed.is_set():
            raise IntegrityError("model.safetensors is corrupt")

    world.on_load = on("b", 1, until_healed)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    await world.until("claim 0.1")
    world.training_open.clear()
    await eventually(lambda: world.log.count("begin load 1 on b") >= 2, "a second try")
    status = await world.status()
    assert [(e.node, e.state, e.version) for e in status.engines if e.node == "b"] == [("b", "down", 0)]
    assert "version 1 was not loaded: IntegrityError: model.safetensors is corrupt" in status.last_failure

    healed.set()
    await world.until("route b open 1")
    world.training_open.set()
    assert (await run.result()).version == 2


async def test_weights_that_no_engine_can_load_fail_the_run_with_the_reason(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_evaluation, "SYNC_SLACK", timedelta(seconds=1))

    async def corrupt(task: EngineTask) -> None:
        raise IntegrityError("model.safetensors is corrupt")

    world.on_load = corrupt
    world.unloadable = {1}
    run = await world.start(limited(world))
    with pytest.raises(WorkflowFailureError) as caught:
        await run.result()
    reason = calls.reason_of(caught.value.cause)
    assert "waited 0:00:02 for the engines to serve version 1" in reason
    assert "model.safetensors is corrupt" in reason
    assert not world.routes
    assert "commit 0.0" in world.log


async def test_a_version_that_is_out_of_date_when_it_is_loaded_opens_no_route(world: FakeWorld) -> None:
    async def until_the_next(task: EngineTask) -> None:
        while not any(e.node == "b" and e.told == 2 for e in (await world.status()).engines):  # noqa: ASYNC110 - a query
            await asyncio.sleep(0.02)

    world.on_load = on("b", 1, until_the_next)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    assert (await run.result()).version == 2
    assert world.position("load 1 on b") < world.position("load 2 on b") < world.position("route b open 2")
    assert routes_of(world, "b") == ["open 0", "held 0", "open 2", "closed"]


async def test_a_revoked_lease_does_not_wait_for_its_load(world: FakeWorld) -> None:
    world.on_load = on("b", 1, hang)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    await world.until("begin load 1 on b")
    await world.pool().execute_update("preempt", PreemptNode(node="b", reason="I need it", hold=True))
    await world.until("park engine b")
    assert (await run.result()).version == 2
    assert routes_of(world, "b") == ["open 0", "held 0", "closed"]


async def test_a_node_that_vanishes_while_it_loads_is_fenced_and_the_run_goes_on(world: FakeWorld) -> None:
    world.on_load = on("b", 1, hang)
    run = await world.start(world.spec(pipeline={"steps": 2}))
    await world.until("begin load 1 on b")
    await world.pool().signal("node_lost", NodeSeen(node="b", boot_id="boot"))
    assert (await run.result()).version == 2
    assert routes_of(world, "b") == ["open 0", "held 0", "closed"]
