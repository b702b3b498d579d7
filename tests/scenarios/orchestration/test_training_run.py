"""What a run does on a real Temporal server, told by what it asked of a fake world."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from fake_world import FakeWorld, eventually
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)

from storage.errors import BadBatch, ConfigError, GangLost, OutOfMemory
from workflows import calls, run_commands, run_evaluation
from workflows.messages import (
    CheckpointRef,
    Command,
    DrainNode,
    NodeSeen,
    NodeStatus,
    Pause,
    PreemptNode,
    RunResult,
    RunStatus,
    SetParams,
    SetTags,
    Stop,
    TrainTask,
)
from workflows.queues import CONTROL_QUEUE
from workflows.training_run import TrainingRun

Run = WorkflowHandle[Any, RunResult]


async def cause_of(run: Run) -> str:
    """Why a run failed."""
    with pytest.raises(WorkflowFailureError) as caught:
        await run.result()
    return calls.reason_of(caught.value.cause)


async def until_route(world: FakeWorld, node: str, route: str) -> None:
    await eventually(lambda: world.routes.get(node) == route, f"route {route!r} of node {node}")


async def test_a_run_trains_every_step_and_evaluates_before_and_after(world: FakeWorld) -> None:
    result = await (await world.start(world.spec(pipeline={"steps": 3}))).result()

    assert (result.steps, result.version, result.reward_before, result.reward_after) == (3, 3, 0.0, 0.75)
    assert result.balanced
    for step in range(3):
        assert world.position(f"claim 0.{step}") < world.position(f"train 0.{step} on m{step}")
        assert world.position(f"train 0.{step} on m{step}") < world.position(f"commit 0.{step}")
    (evaluation,) = (line for line in world.log if line.startswith("evaluate 0"))
    assert evaluation in ("evaluate 0 on [0]", "evaluate 0 on [0, 1]"), "beside the first step, by one that keeps them"
    assert world.position("evaluated 0") < world.position("begin load 1 on b")
    assert world.position("commit 0.2") < world.position("evaluate 3 on [3]") < world.position("finish finished")
    assert set(world.log[-2:]) == {"end processes on a", "end processes on b"}
    assert not world.routes
    # Engines hear of a version only after it is committed, and hold new starts while they load it.
    for version in (1, 2, 3):
        assert world.position(f"commit 0.{version - 1}") < world.position(f"load {version} on b")
        assert world.position(f"route b held {version - 1}") < world.position(f"load {version} on b")
        assert world.position(f"load {version} on b") < world.position(f"route b open {version}")

    # Ranks are started once, before the first step needs them, and found again at every step.
    assert world.log.count("warm ranks") == 1
    found = [line for line in world.log if "ranks at" in line]
    assert found == ["attach ranks at 0", "attach ranks at 1", "attach ranks at 2"]


async def test_the_train_node_is_parked_for_the_update_while_the_other_keeps_its_route(world: FakeWorld) -> None:
    world.training_open.clear()
    run = await world.start()
    await world.until("train 0.0 on m0")

    assert world.position("route a closed") < world.position("park engine a") < world.position("attach ranks at 0")
    assert world.routes == {"b": "open 0"}

    world.training_open.set()
    assert (await run.result()).steps == 1
    assert world.position("park ranks a") < world.position("route a open 1")


async def test_a_step_whose_trainer_rank_dies_is_replayed_from_its_manifest_under_a_new_lineage(
    world: FakeWorld,
) -> None:
    def die_once(task: TrainTask) -> None:
        if task.lineage == 0 and task.manifest.step == 1:
            world.rank_died.set()
            raise GangLost("rank 0 was killed")

    world.on_train = die_once
    result = await (await world.start(world.spec(pipeline={"steps": 3}))).result()

    assert result.steps == 3
    assert world.log.count("claim 0.1") == 1
    assert world.position("rewind to lineage 1") < world.position("train 1.1 on m1") < world.position("commit 1.1")
    assert "start ranks at 1" in world.log
    assert world.position("claim 1.2") < world.position("commit 1.2")


async def test_a_gang_that_dies_again_and_again_fails_the_run_with_the_reason(world: FakeWorld) -> None:
    def die(task: TrainTask) -> None:
        raise GangLost("out of memory")

    world.on_train = die
    assert "out of memory" in await cause_of(await world.start())
    assert "finish failed" in world.log
    assert not world.routes


@pytest.mark.parametrize("error", [BadBatch, OutOfMemory, ConfigError])
async def test_a_batch_that_no_restart_would_cure_stops_the_run_which_goes_on_with_it_when_started_again(
    world: FakeWorld, error: type[Exception]
) -> None:
    def refuse(task: TrainTask) -> None:
        if task.manifest.step == 1:
            raise error("step 1 cannot be trained: session s7 is at fault")

    world.on_train = refuse
    cause = await cause_of(await world.start(world.spec(pipeline={"steps": 2})))
    assert "step 1 cannot be trained: session s7 is at fault" in cause
    assert [line for line in world.log if line.startswith(("train", "rewind"))] == [
        "train 0.0 on m0",
        "train 0.1 on m1",
    ]
    status = await world.status()
    assert (status.phase, status.version) == ("failed", 1)
    assert "session s7 is at fault" in status.last_failure

    world.on_train = lambda _: None
    assert (await (await world.start(world.spec(pipeline={"steps": 2}))).result()).steps == 2
    assert world.log.count("claim 0.1") == 1
    assert world.position("rewind to lineage 1") < world.position("train 1.1 on m1") < world.position("commit 1.1")


async def test_samples_that_an_update_left_out_are_told_with_its_checkpoint(world: FakeWorld) -> None:
    world.dropped = ("s7",)
    await (await world.start()).result()
    world.position("commit 0.0 without s7")


async def test_paused_runs_claim_nothing_until_they_are_resumed(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")

    status: RunStatus = await run.execute_update(TrainingRun.pause, Pause(mode="drain", actor="ann", why="lunch"))
    assert status.paused == "drain"
    await world.until("admission paused=True")
    world.claims_open.set()
    await world.until("audit pause by ann")
    assert world.routes == {"a": "open 0", "b": "open 0"}

    await run.execute_update(TrainingRun.resume, Command(actor="ann"))
    assert (await run.result()).steps == 1
    assert not world.paused


async def test_a_pause_now_closes_every_route_and_a_resume_opens_them_again(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")

    await run.execute_update(TrainingRun.pause, Pause(mode="now"))
    await world.until("hold a True")
    await world.until("hold b True")
    assert world.routes == {}

    await run.execute_update(TrainingRun.resume, Command())
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_pause_that_gives_back_frees_the_nodes(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")

    await run.execute_update(TrainingRun.pause, Pause(mode="drain", give_back=True))
    await world.until("park engine a")
    await world.until("park engine b")
    await world.until_free()

    await run.execute_update(TrainingRun.resume, Command())
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_stop_after_drain_finishes_the_step_and_evaluates(world: FakeWorld) -> None:
    world.training_open.clear()
    run = await world.start(world.spec(pipeline={"steps": 3}))
    await world.until("train 0.0 on m0")
    await run.execute_update(TrainingRun.stop, Stop(mode="drain", actor="ann"))
    world.training_open.set()

    result = await run.result()
    assert (result.stopped, result.steps, result.reward_after) == (True, 1, 0.25)


async def test_a_stop_after_drain_lifts_a_pause_that_gave_the_nodes_back(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start(world.spec(pipeline={"steps": 3}))
    await world.until("wait for batch 0")
    await run.execute_update(TrainingRun.pause, Pause(give_back=True))
    await world.until_free()
    world.claims_open.set()
    await run.execute_update(TrainingRun.stop, Stop(mode="drain", actor="ann"))

    result = await run.result()
    assert (result.stopped, result.steps, result.reward_after) == (True, 1, 0.25)
    assert world.position("audit stop by ann") < world.position("audit resume by ann")


async def test_a_pause_may_last_longer_than_the_limit_of_a_weight_sync(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_evaluation, "SYNC_SLACK", timedelta(seconds=1))
    world.training_open.clear()
    run = await world.start(
        world.spec(
            pipeline={"name": "colocated", "steps": 2},
            evaluation={"every": 1},
            engine={"kind": "scripted", "load_limit_s": 1},
        )
    )
    await world.until("train 0.0 on m0")
    await run.execute_update(TrainingRun.pause, Pause(give_back=True))
    world.training_open.set()
    await world.until_free()
    await asyncio.sleep(2.5)
    await run.execute_update(TrainingRun.resume, Command())
    assert (await run.result()).steps == 2
    assert world.position("evaluate 1 on [1]") < world.position("claim 0.1")


async def test_a_run_that_is_cancelled_in_the_ui_ends_its_step_and_frees_the_nodes(world: FakeWorld) -> None:
    world.training_open.clear()
    run = await world.start()
    await world.until("train 0.0 on m0")
    await run.cancel()
    with pytest.raises(WorkflowFailureError):
        await run.result()
    await world.until_free()
    step = await world.client.get_workflow_handle(calls.step_id(world.run, 0, 0)).describe()
    assert step.status is WorkflowExecutionStatus.COMPLETED
    assert "finish stopped" in world.log


async def test_a_stop_now_ends_a_run_that_waits_for_its_batch(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")
    await run.execute_update(TrainingRun.stop, Stop(mode="now"))

    result = await run.result()
    assert (result.stopped, result.steps) == (True, 0)
    assert "finish stopped" in world.log


async def test_a_node_can_be_preempted_by_hand_and_given_back(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")

    await world.pool().execute_update("preempt", PreemptNode(node="b", reason="I need it", hold=True))
    await world.until("park engine b")
    assert world.routes == {"a": "open 0"}

    back = await world.pool().execute_update(
        "set_tags", SetTags(node="b", tags=frozenset({"rollout"})), result_type=NodeStatus
    )
    assert back.health == "up"
    await until_route(world, "b", "open 0")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_drained_node_gets_no_lease_until_the_drain_is_undone(world: FakeWorld) -> None:
    await world.pool().execute_update("drain", DrainNode(node="b"))
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")
    assert world.routes == {"a": "open 0"}

    await world.pool().execute_update("drain", DrainNode(node="b", undo=True))
    await until_route(world, "b", "open 0")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_node_that_is_reported_dead_is_fenced_and_the_run_goes_on_without_it(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")

    await world.pool().signal("node_lost", NodeSeen(node="b", boot_id="boot"))
    await world.until("route b closed")
    world.claims_open.set()
    assert (await run.result()).steps == 1
    assert "load 1 on b" not in world.log


async def test_checkpoint_now_answers_with_the_checkpoint_of_the_update_in_work(world: FakeWorld) -> None:
    world.training_open.clear()
    run = await world.start()
    await world.until("train 0.0 on m0")
    asked = asyncio.create_task(run.execute_update(TrainingRun.checkpoint_now, Command(actor="ann")))
    await world.until("audit checkpoint_now by ann")
    world.training_open.set()

    checkpoint: CheckpointRef = await asked
    assert (checkpoint.step, checkpoint.path) == (0, "/c0")
    await run.result()


async def test_checkpoint_now_says_what_it_waited_for_when_an_update_takes_too_long(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_commands, "CHECKPOINT_SLACK", timedelta(seconds=0))
    world.training_open.clear()
    run = await world.start(world.spec(trainer={"step_time_limit_s": 0.5}))
    await world.until("train 0.0 on m0")
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await run.execute_update(TrainingRun.checkpoint_now, Command(actor="ann"))
    assert "made no checkpoint within" in str(refused.value.cause)
    assert "it waits for step 0" in str(refused.value.cause)
    world.training_open.set()
    assert (await run.result()).steps == 1


async def test_values_can_be_changed_while_a_run_lives_and_bad_ones_are_refused(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start(world.spec(pipeline={"steps": 3}))
    await world.until("wait for batch 0")

    for patch, message in (
        ({"pipeline": {"steps": 0}}, "greater than or equal to 1"),
        ({"model": {"path": "/other"}}, "cannot be changed while a run lives"),
    ):
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await run.execute_update(TrainingRun.set_params, SetParams(patch=patch))
        assert message in str(refused.value.cause)

    await run.execute_update(TrainingRun.set_params, SetParams(patch={"pipeline": {"steps": 1, "target_in_flight": 7}}))
    await world.until("rate 7")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_an_on_policy_run_starts_a_batch_only_when_every_engine_serves_the_new_weights(world: FakeWorld) -> None:
    await (await world.start(world.spec(pipeline={"steps": 2, "name": "colocated"}))).result()
    assert world.admitted == [2, 4]
    for node in ("a", "b"):
        assert world.position(f"route {node} open 1") < world.position("wait for batch 1")


async def test_an_agent_that_cannot_be_loaded_fails_the_run_with_its_message(world: FakeWorld) -> None:
    world.stream_error = "agent.target: no module named 'my_agent'"
    world.claims_open.clear()
    assert "no module named 'my_agent'" in await cause_of(await world.start())


async def test_a_data_stream_that_ends_under_a_living_run_is_started_again(world: FakeWorld) -> None:
    world.claims_open.clear()
    run = await world.start()
    await world.until("wait for batch 0")
    await world.until("stream train")
    await world.client.get_workflow_handle(calls.data_id(world.run)).signal("stop")
    await eventually(lambda: world.log.count("stream train") == 2, "a second stream")
    world.claims_open.set()
    assert (await run.result()).steps == 1


async def test_a_run_goes_on_over_generations_of_its_history(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CONTINUE_AS_NEW_EVENTS", 60)
    result = await (await world.start(world.spec(pipeline={"steps": 3}))).result()

    assert (result.steps, result.reward_before, result.reward_after) == (3, 0.0, 0.75)
    generations = [w async for w in world.client.list_workflows(f"WorkflowId = '{calls.run_id(world.run)}'")]
    assert len(generations) > 1
    assert world.log.count("stream train") == 1
    assert world.log.count("attach ranks at 0") == 1


async def test_input_with_a_typing_mistake_fails_with_the_name_of_the_field(world: FakeWorld) -> None:
    data = world.spec().model_dump(mode="json")
    data["pipeline"]["stepz"] = 3
    run: Run = await world.client.start_workflow(
        "TrainingRun", data, id=calls.run_id(world.run), task_queue=CONTROL_QUEUE
    )
    assert "stepz" in await cause_of(run)


async def test_a_run_without_a_pool_says_what_to_start(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "POOL_TRIES", 1)
    assert "start a node agent first" in await cause_of(await world.start(world.spec(cluster="nowhere")))


async def test_commands_on_unknown_nodes_are_refused_with_the_known_ones(world: FakeWorld) -> None:
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await world.pool().execute_update("preempt", PreemptNode(node="z", reason="typing mistake"))
    assert "known nodes: a, b" in str(refused.value.cause)
