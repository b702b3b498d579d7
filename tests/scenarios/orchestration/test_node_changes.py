"""Nodes die, join and change their roles in every phase of a step: each batch is claimed and committed once.

The matrix of phases and changes is scripted; workflows and Temporal server are real, engines and ranks are played.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

import pytest
from fake_world import FakeWorld, eventually

from workflows.messages import NodeSeen, NodeStatus, SetTags

PHASES = {
    "waits for its batch": "wait for batch 1",
    "starts its ranks": "attach ranks at 1",
    "trains": "train 0.1 on m1",
    "commits": "begin commit 0.1",
    "loads its weights": "begin load 2 on b",
}
STEPS = 3
Change = Callable[[FakeWorld, contextlib.AsyncExitStack], Awaitable[None]]


async def until_node(world: FakeWorld, node: str, what: str, is_so: Callable[[NodeStatus], bool]) -> None:
    """Wait until the pool's status shows it."""
    status = None
    for _ in range(600):
        status = (await world.pool_status()).node(node)
        if status is not None and is_so(status):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"node {node} is not shown {what}: {status}")


async def rollout_node_dies(world: FakeWorld, _: contextlib.AsyncExitStack) -> None:
    await world.pool().signal("node_lost", NodeSeen(node="b", boot_id="boot"))
    await until_node(world, "b", "as lost", lambda node: node.health == "lost" and node.lease is None)
    await eventually(lambda: "b" not in world.routes, "the route of b to close")


async def train_node_dies_and_is_replaced(world: FakeWorld, _: contextlib.AsyncExitStack) -> None:
    await world.pool().signal("node_lost", NodeSeen(node="a", boot_id="boot"))
    await until_node(world, "a", "as lost", lambda node: node.health == "lost" and node.lease is None)
    world.gang = None  # its ranks are gone with it
    await world.add_node("a", boot="another boot")
    await until_node(world, "a", "as back", lambda node: node.health == "up")


async def node_joins(world: FakeWorld, stack: contextlib.AsyncExitStack) -> None:
    await stack.enter_async_context(world.playing("c"))
    await world.add_node("c")
    await until_node(world, "c", "with a lease", lambda node: node.lease is not None)
    await eventually(lambda: "c" in world.routes, "the route of c to open")


async def rollout_node_gets_another_tag(world: FakeWorld, _: contextlib.AsyncExitStack) -> None:
    await world.pool().execute_update("set_tags", SetTags(node="b", tags=frozenset({"reward"}), actor="ann"))
    await until_node(world, "b", "re-tagged and free", lambda n: n.tags == ("reward",) and n.activity == "free")
    assert "b" not in world.routes


async def rollout_node_becomes_a_train_node(world: FakeWorld, _: contextlib.AsyncExitStack) -> None:
    await world.pool().execute_update("set_tags", SetTags(node="b", tags=frozenset({"rollout", "train"}), actor="ann"))
    await until_node(world, "b", "with both tags", lambda node: node.tags == ("rollout", "train"))


CHANGES: tuple[Change, ...] = (
    rollout_node_dies,
    train_node_dies_and_is_replaced,
    node_joins,
    rollout_node_gets_another_tag,
    rollout_node_becomes_a_train_node,
)


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
@pytest.mark.parametrize("phase", PHASES, ids=[phase.replace(" ", "_") for phase in PHASES])
async def test_no_batch_is_lost_or_trained_twice_when_a_step(world: FakeWorld, phase: str, change: Change) -> None:
    world.halt_at = PHASES[phase]
    async with contextlib.AsyncExitStack() as stack:
        run = await world.start(world.spec(pipeline={"steps": STEPS}, pool={"nodes": "any"}))
        await world.until(world.halt_at)
        await change(world, stack)
        world.go_on.set()
        result = await run.result()

    assert (result.steps, result.version, result.balanced) == (STEPS, STEPS, True)
    claims, trained, commits = (events(world, what) for what in ("claim", "train", "commit"))
    assert [step for _, step in claims] == list(range(STEPS)), "each batch is claimed once, in order"
    assert [step for _, step in commits] == list(range(STEPS)), "each step is committed once, in order"
    assert set(commits) <= set(trained), "what is committed was trained under the same lineage"


def events(world: FakeWorld, what: str) -> list[tuple[int, int]]:
    """Lineage and step of each such line of the log, in order."""
    found = [re.match(rf"{what} (\d+)\.(\d+)\b", line) for line in world.log]
    return [(int(match[1]), int(match[2])) for match in found if match]
