"""Gradients accumulated ahead of their batch give the update of the whole batch, in real ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from storage.objects import ObjectStore
from storage.seaweed import Weed
from workers.trainer.messages import UpdateRequest, UpdateResult


async def train(gang: Any, parts: list[UpdateRequest], whole: UpdateRequest) -> UpdateResult:
    async with gang:
        await gang.ready()
        for part in parts:
            await asyncio.gather(*(client.accumulate(part, deadline_s=120) for client in gang.clients))
        result: UpdateResult = await gang.update(whole)
        return result


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "aggregation"),
    [(1, 0, "sequence_mean"), (2, 1, "token_mean")],
    ids=["one rank", "two ranks"],
)
async def test_parts_give_the_same_update_as_the_whole_batch(
    make: Any,
    qwen: Path,
    weed: Weed,
    object_store: ObjectStore,
    tmp_path: Path,
    ranks: int,
    zero_stage: int,
    aggregation: str,
) -> None:
    spec = make.make_spec(qwen, trainer={"zero_stage": zero_stage}, algorithm={"aggregation": aggregation})
    shards = [make.random_shard(ordinal, ordinal) for ordinal in range(3)]
    whole = make.put_batch(object_store, 0, shards)
    parts = [make.put_batch(object_store, 0, shards[:1]), make.put_batch(object_store, 0, shards[1:2])]
    results = []
    for name, ahead in (("plain", []), ("ahead", parts)):
        state = make.make_cluster(tmp_path / name, weed, object_store)
        results.append(await train(make.Gang(spec, state, ranks), ahead, whole))
    plain, early = results
    for figure in ("loss", "grad_norm", "entropy", "logprob_gap_mean", "tokens"):
        assert getattr(early.metrics, figure) == pytest.approx(getattr(plain.metrics, figure), rel=1e-4, abs=1e-7)
    weights = [load_file(Path(result.weights_path) / "model.safetensors") for result in results]
    assert weights[0].keys() == weights[1].keys()
    moved = max(float(abs(weights[0][name] - weights[1][name]).max()) for name in weights[0])
    assert moved < 1e-4, "the learning rate is 1e-2: an update moves weights by about that much"
