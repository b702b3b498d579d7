"""Trainer ranks as real processes with DeepSpeed: kill, resume, publish."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from storage.errors import GangLost, TrainerError
from storage.objects import ObjectStore
from storage.seaweed import Weed
from storage.weights import folder_digest
from workers.cluster import StateFolder
from workers.trainer.batch import read_batch
from workers.trainer.messages import UpdateRequest, UpdateResult
from workers.trainer.objective import Objective
from workers.trainer.packing import pack
from workflows.spec import RunSpec

STEPS = 3


@dataclass
class History:
    """A gang that trained :data:`STEPS` steps and was killed in the next one."""

    ranks: int
    spec: RunSpec
    state: StateFolder
    results: list[UpdateResult]
    requests: list[UpdateRequest]


async def _until_working(gang: Any, version: int) -> None:
    async with asyncio.timeout(60):
        while True:
            status = await gang.clients[0].status()
            if status.phase in ("loading", "training", "saving") or status.version > version:
                return


async def _train_then_kill(make: Any, gang: Any, requests: list[UpdateRequest]) -> list[UpdateResult]:
    async with gang:
        await gang.ready()
        results = [await gang.update(request) for request in requests[:STEPS]]
        last = asyncio.gather(*(c.update(requests[STEPS], deadline_s=60) for c in gang.clients), return_exceptions=True)
        await _until_working(gang, STEPS)
        for rank in range(gang.ranks):
            gang.kill(rank)
        await last
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def history(
    request: pytest.FixtureRequest,
    make: Any,
    qwen: Path,
    weed: Weed,
    object_store: ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> History:
    state = make.make_cluster(tmp_path_factory.mktemp("cluster") / "state", weed, object_store)
    spec = make.make_spec(qwen, trainer={"keep_checkpoints": 10})
    batches = [[make.random_shard(ordinal, step) for ordinal in range(3)] for step in range(STEPS + 1)]
    requests = [make.put_batch(object_store, step, shards) for step, shards in enumerate(batches)]
    results = asyncio.run(_train_then_kill(make, make.Gang(spec, state, request.param), requests))
    return History(request.param, spec, state, results, requests)


async def test_a_killed_gang_resumes_and_gives_the_same_weights(make: Any, history: History) -> None:
    first = history.results[0]
    gang = make.Gang(
        history.spec,
        history.state,
        history.ranks,
        checkpoint=Path(first.checkpoint_path),
        checkpoint_digest=first.checkpoint_digest,
    )
    async with gang:
        await gang.ready()
        assert (await gang.clients[0].status()).version == 1
        # step 1 was committed before the kill, though the gang was started from the checkpoint before it
        assert await gang.update(history.requests[1]) == history.results[1]
        # step 2 is trained anew
        replayed = await gang.update(history.requests[2].model_copy(update={"lineage": 1}))
        assert replayed.checkpoint_path != history.results[2].checkpoint_path
        assert replayed.weights_digest == history.results[2].weights_digest
        assert replayed.metrics.loss == history.results[2].metrics.loss
        # the step in which the gang was killed has left nothing in the way
        assert (await gang.update(history.requests[STEPS].model_copy(update={"lineage": 1}))).version == STEPS + 1


def test_training_changes_the_weights_in_each_step(history: History) -> None:
    assert len({result.weights_digest for result in history.results}) == STEPS
    for result in history.results:
        assert result.metrics.optimizer_steps == 1
        assert result.metrics.grad_norm > 0
        assert result.metrics.ratio_max == 1.0
        assert result.metrics.tokens_computed < result.metrics.tokens_in_rows


def test_loss_and_gradient_are_those_of_every_trajectory_computed_alone(
    history: History, qwen: Path, object_store: ObjectStore
) -> None:
    """Whatever the number of ranks: plain torch, one row at a time, is the oracle."""
    import torch
    from transformers import AutoModelForCausalLM

    batch = read_batch(object_store, history.requests[0], "demo", history.spec.algorithm)
    model: Any = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32).eval()
    total = 0.0
    for row in batch.rows:
        one = pack([row])
        output = model(input_ids=torch.from_numpy(one.ids_T)[None], logits_to_keep=torch.from_numpy(one.predictor_K))
        loss, _ = Objective(history.spec.algorithm, 1.0)(output.logits[0, torch.from_numpy(one.predictor_N)], one)
        loss.backward()
        total += float(loss.detach())
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()

    metrics = history.results[0].metrics
    assert metrics.loss == pytest.approx(total, abs=1e-6)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)


def test_a_published_model_has_the_log_probs_that_the_back_end_computes(
    make: Any, history: History, object_store: ObjectStore, tmp_path: Path
) -> None:
    """The back end reads the same rows packed and alone; both agree."""
    spec = make.make_spec(Path(history.results[-1].weights_path))
    launch = {"spec": spec.model_dump(mode="json"), "master_port": make.free_port(), "state": str(tmp_path)}
    request = history.requests[0]
    batch = read_batch(object_store, request, "demo", spec.algorithm)
    code = """
import json, pickle
from workers.trainer.deepspeed_backend import DeepSpeedBackend
from workers.trainer.launch import Launch
given = pickle.load(open("GIVEN", "rb"))
launch = Launch(**given["launch"], rank=0, world_size=1, control_port=1, token="x" * 16, epoch=1)
backend = DeepSpeedBackend(launch)
backend.initialize()
found = [[p.tolist() for p in backend.logprobs(batches, 1.0)] for batches in given["batches"]]
print("FOUND" + json.dumps(found))
"""
    given = {"launch": launch, "batches": [[pack(batch.rows)], [pack([row]) for row in batch.rows]]}
    (tmp_path / "given").write_bytes(pickle.dumps(given))
    printed = make.nursery().run(code.replace("GIVEN", str(tmp_path / "given")), tmp_path)
    packed, alone = json.loads(printed.split("FOUND")[1])
    assert len(packed[0]) == history.results[0].metrics.tokens
    assert packed[0] == pytest.approx([p for row in alone for p in row], abs=1e-5)
    assert max(packed[0]) < 0


def test_published_weights_are_a_model_directory(history: History, qwen: Path) -> None:
    result = history.results[-1]
    folder = Path(result.weights_path)
    assert folder_digest(folder) == result.weights_digest
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (qwen / name).read_bytes()
    with (
        safe_open(folder / "model.safetensors", "pt") as published,
        safe_open(qwen / "model.safetensors", "pt") as initial,
    ):
        # the tied head is not written a second time
        assert set(published.keys()) == set(initial.keys()) - {"lm_head.weight"}


def test_the_model_directory_loads_in_transformers(history: History) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(history.results[-1].weights_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


async def test_a_rank_that_dies_is_noticed_by_the_others(
    make: Any, qwen: Path, weed: Weed, object_store: ObjectStore, tmp_path: Path
) -> None:
    state = make.make_cluster(tmp_path, weed, object_store)
    request = make.put_batch(object_store, 0, [make.random_shard(0, 1)])
    async with make.Gang(make.make_spec(qwen, model={"dtype": "bfloat16"}), state, ranks=2) as gang:
        await gang.ready()
        gang.kill(1)
        with pytest.raises(GangLost):
            await gang.clients[0].update(request, deadline_s=60)
        assert (await gang.clients[0].status()).phase == "failed"


async def test_bfloat16_weights_are_published_as_such(
    make: Any, qwen: Path, weed: Weed, object_store: ObjectStore, tmp_path: Path
) -> None:
    state = make.make_cluster(tmp_path, weed, object_store)
    request = make.put_batch(object_store, 0, [make.random_shard(0, 1)])
    async with make.Gang(make.make_spec(qwen, model={"dtype": "bfloat16"}), state) as gang:
        await gang.ready()
        result = await gang.update(request)
        await gang.clients[0].shutdown()
        assert gang.processes[0].wait(timeout=30) == 0
    folder = Path(result.weights_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(folder / "model.safetensors", "pt") as published:
        assert {str(published.get_tensor(name).dtype) for name in list(published.keys())} == {"torch.bfloat16"}


async def test_a_model_path_that_does_not_exist_is_told(
    make: Any, weed: Weed, object_store: ObjectStore, tmp_path: Path
) -> None:
    state = make.make_cluster(tmp_path, weed, object_store)
    async with make.Gang(make.make_spec(tmp_path / "no-model"), state) as gang:
        with pytest.raises(TrainerError, match=r"no config\.json there"):
            await gang.ready()


def test_a_wrong_launch_file_ends_the_process_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers.trainer", "--launch", str(tmp_path / "launch.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: launch file {tmp_path / 'launch.json'} does not exist")


async def test_ppo_with_critic_and_reference_resumes_from_a_checkpoint_with_the_same_weights(
    make: Any, qwen: Path, weed: Weed, object_store: ObjectStore, tmp_path: Path
) -> None:
    algorithm = {"name": "ppo", "kl": "k3", "kl_coefficient": 0.1, "minibatches": 2, "epochs": 2, "value_clip": 0.2}
    trainer = {"keep_checkpoints": 10, "zero_stage": 3, "activation_checkpointing": True, "schedule": "linear"}
    spec = make.make_spec(qwen, algorithm={**algorithm, "critic_learning_rate": 1e-3}, trainer=trainer)
    state = make.make_cluster(tmp_path / "state", weed, object_store)
    shards = [make.random_shard(ordinal, 1) for ordinal in range(4)]
    requests = [make.put_batch(object_store, step, shards) for step in range(2)]
    async with make.Gang(spec, state) as gang:
        await gang.ready()
        first, second = [await gang.update(request) for request in requests]
    assert first.metrics.optimizer_steps == 4
    assert first.metrics.explained_variance == pytest.approx(0.0, abs=1e-6)  # a new critic says 0 for every state
    assert second.metrics.value_loss < first.metrics.value_loss
    assert first.metrics.learning_rate == pytest.approx(1e-2)
    assert second.metrics.learning_rate == pytest.approx(9e-3)  # of 10 steps
    assert second.metrics.reference_kl > first.metrics.reference_kl > 0

    shutil.rmtree(second.checkpoint_path)
    async with make.Gang(spec, state, checkpoint=Path(first.checkpoint_path)) as gang:
        await gang.ready()
        again = await gang.update(requests[1])
    assert again.weights_digest == second.weights_digest
    assert again.metrics.value_loss == second.metrics.value_loss
