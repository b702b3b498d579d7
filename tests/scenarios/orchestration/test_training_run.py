"""What a run does on a real Temporal server, told by what it asked of a fake world."""

from __future__ import annotations

import asyncio

import pytest
from fake_world import FakeWorld
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError

from storage.errors import GangLost
from workers.cluster import CONTROL_QUEUE
from workflows.messages import Command, Pause, PreemptNode, RunStatus, SetParams, Stop, TrainTask


async def test_a_run_trains_every_step_and_evaluates_before_and_after(world: FakeWorld) -> None:
    result = await (await world.start()).result()

    assert (result.steps, result.version, result.reward_before, result.reward_after) == (3, 3, 0.0, 0.75)
    assert result.balanced
    for step in range(3):
        assert world.position(f"claim 0.{step}") < world.position(f"train 0.{step} on m{step}")
        assert world.position(f"train 0.{step} on m{step}") < world.position(f"commit 0.{step}")
    assert world.position("evaluate 0 on [0]") < world.position("claim 0.0")
    assert world.position("commit 0.2") < world.position("finish finished")
    assert world.log[-2:] == ["end processes on a", "end processes on b"] or set(world.log[-2:]) == {
        "end processes on a",
        "end processes on b",
    }
    assert not world.routes
