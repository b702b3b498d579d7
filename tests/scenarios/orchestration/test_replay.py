"""Workflows do the same again when their histories are replayed, as after the death of a control worker."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from fake_world import NODES, FakeWorld
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from storage.errors import GangLost
from workers.control import WORKFLOWS, workflow_runner

APART = {"name": "ppo", "critic_on": "own", "kl": "k3", "kl_coefficient": 0.1, "reference_on": "own"}
RUNS: dict[str, dict[str, Any]] = {
    "multiplexed": {"pipeline": {"steps": 3}},
    "off_policy": {"pipeline": {"steps": 3, "name": "off_policy", "accumulate": True}},
    "apart": {"pipeline": {"steps": 3}, "algorithm": {"group_size": 2, "groups_per_step": 2, **APART}},
}
MODELS = {"q": "reference", "r": "reference", "c": "critic"}


async def histories(world: FakeWorld) -> list[WorkflowHistory]:
    """Of every workflow of the world's run."""
    found = []
    async for row in world.client.list_workflows():
        if world.run in row.id:
            found.append(await world.client.get_workflow_handle(row.id, run_id=row.run_id).fetch_history())
    return found


@pytest.mark.parametrize("name", RUNS)
async def test_every_workflow_of_a_run_with_losses_is_replayed_without_a_difference(
    world: FakeWorld, name: str
) -> None:
    def trainer_dies(task: Any) -> None:
        if task.lineage == 0 and task.manifest.step == 1:
            world.rank_died.set()
            raise GangLost("rank 0 was killed")

    def companion_dies(task: Any) -> None:
        if task.manifest.step == 2 and task.node not in died:
            died.add(task.node)
            world.deaths[task.node].set()
            raise GangLost("rank 0 was killed")

    died: set[str] = set()
    world.on_train, world.on_pass = trainer_dies, companion_dies
    models = MODELS if name == "apart" else {}
    tagged = {**NODES, **{node: frozenset({tag}) for node, tag in models.items()}}
    nodes = [{"id": node, "tags": sorted(tags)} for node, tags in tagged.items()]
    async with contextlib.AsyncExitStack() as stack:
        for node, tag in models.items():
            await stack.enter_async_context(world.playing(node))
            await world.add_node(node, tags=frozenset({tag}))
        result = await (await world.start(world.spec(**{**RUNS[name], "nodes": nodes}))).result()
        assert result.steps == 3
        assert "rewind to lineage 1" in world.log
        assert died == set(models)

        found = await histories(world)
        kinds = {history.workflow_id.partition("/")[0] for history in found}
        assert kinds == {"run", "lease", "pool"}
        replayer = Replayer(
            workflows=WORKFLOWS, data_converter=pydantic_data_converter, workflow_runner=workflow_runner()
        )
        for history in found:
            await replayer.replay_workflow(history)
