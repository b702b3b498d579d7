"""What cannot be trained, in real ranks with DeepSpeed: nothing changes, and the gang goes on."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from storage.errors import BadBatch, OutOfMemory
from storage.objects import ObjectStore
from storage.seaweed import Weed
from workers.trainer.messages import UpdateRequest, UpdateResult
from workers.trainer.scripted_loss import NO_CPU_MEMORY, NO_NUMBER

SCRIPTED = {"loss": "workers.trainer.scripted_loss:loss"}


def batch(make: Any, store: ObjectStore, step: int = 0, *, fault: float | None = None) -> UpdateRequest:
    """Two groups of three sessions; the last token of session s1.1 has the log-prob ``fault``; None: without it."""
    shards = []
    for ordinal in range(2):
        shard = make.ShardBuilder(ordinal)
        root = shard.prompt(-1, [3 + ordinal] * 8)
        for sample in range(3):
            name, logprobs = f"s{ordinal}.{sample}", [-4.0, -4.0, -4.0]
            if name == "s1.1":
                if fault is None:
                    continue
                logprobs[-1] = fault
            leaf = shard.completion(root, [10 + sample, 20, 30], session=name, logprobs=logprobs)
            shard.session(name, reward=float(sample), leaves=[leaf])
        shards.append(shard.build())
    request: UpdateRequest = make.put_batch(store, step, shards)
    return request


async def test_two_ranks_notice_together_what_cannot_be_trained_and_give_the_weights_of_the_rest(
    make: Any, qwen: Path, weed: Weed, object_store: ObjectStore, tmp_path: Path
) -> None:
    good, bad = ([batch(make, object_store, step, fault=fault) for step in range(2)] for fault in (None, NO_NUMBER))
    hungry = batch(make, object_store, 2, fault=NO_CPU_MEMORY)

    def gang(on_bad_batch: str) -> Any:
        spec = make.make_spec(qwen, algorithm=SCRIPTED, trainer={"row_tokens": 24, "on_bad_batch": on_bad_batch})
        return make.Gang(spec, make.make_cluster(tmp_path / on_bad_batch, weed, object_store), ranks=2)

    async with gang("stop") as ranks:
        await ranks.ready()
        calls = (client.update(bad[0], deadline_s=60) for client in ranks.clients)
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, BadBatch)
            assert "session s1.1 (trained generation 1)" in str(error)
            assert " on rank " in str(error)
        assert {(await client.status()).phase for client in ranks.clients} == {"ready"}
        stopped: list[UpdateResult] = [await ranks.update(request) for request in good]

    async with gang("skip") as ranks:
        await ranks.ready()
        skipped: list[UpdateResult] = [await ranks.update(request) for request in (good[0], bad[1])]
        assert skipped[1].dropped == ("s1.1",)
        assert [one.weights_digest for one in stopped] == [one.weights_digest for one in skipped]
        # The rank that lacks memory says so while the other waits for its gradient.
        asked = [asyncio.create_task(client.update(hungry, deadline_s=60)) for client in ranks.clients]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(OutOfMemory, match=r"step 2: rank \d ran out of memory \(train and save, micro-batch \d of"):
            done.pop().result()
        for call in waiting:
            call.cancel()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_back_end_makes_no_step_on_a_gradient_that_is_not_finite(
    make: Any, qwen: Path, tmp_path: Path, zero_stage: int
) -> None:
    """Wherever in the model it comes from: here the loss of every token is in order."""
    spec = make.make_spec(qwen, trainer={"zero_stage": zero_stage}).model_dump(mode="json")
    code = """
from workers.profiling.train import _sequence
from workers.trainer.deepspeed_backend import DeepSpeedBackend
from workers.trainer.launch import Launch
from workers.trainer.objective import StepSums
from workers.trainer.states import trained_tensors

backend = DeepSpeedBackend(Launch(rank=0, world_size=1, control_port=1, token="x" * 16, epoch=1, **GIVEN))
backend.initialize()

def loss(slope):
    return lambda logits, _: ((logits * slope).sum(), StepSums(loss=1.0))

for slope in (1.0, float("nan"), float("inf"), 1.0):
    parameters = trained_tensors(backend._engine)
    before = [p.detach().clone() for p in parameters]
    backend.accumulate([_sequence(0, 8, 64, 1)], loss(slope), 1.0)
    norm = backend.update(1.0)
    print("STEP", norm, any(bool((p != old).any()) for p, old in zip(parameters, before)))
"""
    given = {"spec": spec, "master_port": make.free_port(), "state": str(tmp_path)}
    printed = make.nursery().run(code.replace("GIVEN", repr(given)), tmp_path)
    steps = [line.split()[1:] for line in printed.splitlines() if line.startswith("STEP")]
    assert [math.isfinite(float(norm)) for norm, _ in steps] == [True, False, False, True], printed
    assert [moved for _, moved in steps] == ["True", "False", "False", "True"]
