"""A reference on nodes of its own: its numbers are the trainer's own, whoever computes which share, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from columns import told

from storage.errors import IntegrityError, TrainerError
from storage.objects import ObjectStore
from storage.seaweed import Weed
from workers.trainer.messages import UpdateRequest, UpdateResult
from workflows.spec import RunSpec

STEPS = 2
pytestmark = pytest.mark.timeout(300)


class Bench:
    """Gangs that share an object store; each has a state folder of its own."""

    def __init__(self, make: Any, qwen: Path, weed: Weed, store: ObjectStore, folder: Path) -> None:
        self._make, self._qwen, self._weed, self._store, self._folder = make, qwen, weed, store, folder
        self._states = 0

    def spec(self, where: str, ranks: int = 1, **algorithm: Any) -> RunSpec:
        """Two optimizer steps an update, so that weights depend on what the reference says."""
        nodes = [{"id": "a", "tags": ["rollout", "train"], "ranks": ranks}]
        nodes += [{"id": "r", "tags": ["reference"]}] if where == "own" else []
        settings = {"kl": "k3", "kl_coefficient": 0.5, "minibatches": 2, "reference_on": where, **algorithm}
        spec: RunSpec = self._make.make_spec(self._qwen, trainer={"row_tokens": 24})
        return RunSpec.model_validate({**spec.model_dump(), "nodes": nodes, "algorithm": settings})

    def gang(self, spec: RunSpec, role: str = "trainer", ranks: int = 1) -> Any:
        self._states += 1
        state = self._make.make_cluster(self._folder / f"state{self._states}", self._weed, self._store)
        return self._make.Gang(spec, state, ranks=ranks, role=role)

    def request(self, step: int) -> UpdateRequest:
        shards = [self._make.random_shard(ordinal, step, samples=3) for ordinal in range(3)]
        request: UpdateRequest = self._make.put_batch(self._store, step, shards)
        return request


@pytest.fixture
def bench(make: Any, qwen: Path, weed: Weed, column_store: ObjectStore, tmp_path: Path) -> Bench:
    return Bench(make, qwen, weed, column_store, tmp_path)


async def trained_in_the_trainer(bench: Bench, ranks: int = 1, **algorithm: Any) -> list[UpdateResult]:
    async with bench.gang(bench.spec("trainer", ranks, **algorithm), ranks=ranks) as gang:
        await gang.ready()
        return [await gang.update(bench.request(step)) for step in range(STEPS)]


@pytest.mark.parametrize(("ranks", "ranks_of_reference", "shares"), [(1, 1, 1), (1, 1, 3), (2, 1, 1), (1, 2, 2)])
async def test_weights_are_those_of_a_run_whose_trainer_holds_the_reference(
    bench: Bench, ranks: int, ranks_of_reference: int, shares: int
) -> None:
    expected = await trained_in_the_trainer(bench, ranks)
    spec = bench.spec("own", ranks)
    async with bench.gang(spec, ranks=ranks) as trainer, bench.gang(spec, "reference", ranks_of_reference) as reference:
        await trainer.ready()
        await reference.ready()
        for step in range(STEPS):
            request = bench.request(step)
            written = [await reference.columns(request, share=share, shares=shares) for share in range(shares)]
            result = await trainer.update(told(request, *written))
            assert result.metrics.reference_kl == expected[step].metrics.reference_kl
            assert result.weights_digest == expected[step].weights_digest
    assert expected[-1].metrics.reference_kl > 0


async def test_a_kl_in_the_reward_comes_from_the_reference_s_nodes_too(bench: Bench) -> None:
    algorithm = {"kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1}
    expected = await trained_in_the_trainer(bench, **algorithm)
    spec = bench.spec("own", **algorithm)
    async with bench.gang(spec) as trainer, bench.gang(spec, "reference") as reference:
        await trainer.ready()
        await reference.ready()
        for step in range(STEPS):
            request = bench.request(step)
            result = await trainer.update(told(request, await reference.columns(request)))
            assert result.weights_digest == expected[step].weights_digest


async def test_a_reference_that_is_killed_in_its_pass_writes_the_same_column_when_it_is_asked_again(
    bench: Bench,
) -> None:
    spec, request = bench.spec("own"), bench.request(0)
    async with bench.gang(spec, "reference") as undisturbed:
        await undisturbed.ready()
        expected = await undisturbed.columns(request)
    bench._store.delete(expected.key)
    async with bench.gang(spec, "reference") as reference:
        await reference.ready()
        reference.processes[0].dies_at.write_text("forward")
        with contextlib.suppress(Exception):
            await reference.columns(request)
        assert reference.processes[0].wait(timeout=30) == -9
    async with bench.gang(spec, "reference") as again:
        await again.ready()
        assert await again.columns(request) == expected
        again.processes[0].dies_at.write_text("forward")
        assert await again.columns(request) == expected, "what is written is not computed again"


async def test_ranks_refuse_what_is_not_theirs_and_what_came_without_its_column_or_with_another_s(
    bench: Bench,
) -> None:
    spec = bench.spec("own")
    async with bench.gang(spec) as trainer, bench.gang(spec, "reference") as reference:
        await asyncio.gather(trainer.ready(), reference.ready())
        request, other = bench.request(0), bench.request(1)
        with pytest.raises(TrainerError, match="came without the column reference_logprob"):
            await trainer.update(request)
        foreign = await reference.columns(other)
        with pytest.raises(IntegrityError, match="it is of another batch"):
            await trainer.update(told(request, foreign))
        with pytest.raises(TrainerError, match="role 'trainer', which says nothing"):
            await trainer.columns(request)
        with pytest.raises(TrainerError, match="role 'reference', which trains nothing"):
            await reference.update(request)
        status = await trainer.clients[0].status()
        assert (status.phase, status.version) == ("ready", 0)
