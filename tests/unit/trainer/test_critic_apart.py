"""A critic on nodes of its own: policy and critic are those of a run whose trainer holds both, whatever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
from columns import told

from storage.errors import FencedError, TrainerError
from storage.objects import ObjectStore
from storage.seaweed import Weed
from workers.trainer.messages import ColumnRef, UpdateRequest, UpdateResult
from workflows.spec import RunSpec

STEPS = 2
pytestmark = pytest.mark.timeout(400)
PPO = {"name": "ppo", "minibatches": 2, "epochs": 2, "value_clip": 0.2, "critic_learning_rate": 1e-2, "gae_lambda": 0.9}
WITH_KL = {**PPO, "kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1, "critic_warmup": 1}


class Bench:
    """Gangs that share an object store; those of one name share a state folder, as a cluster's do."""

    def __init__(self, make: Any, qwen: Path, weed: Weed, store: ObjectStore, folder: Path) -> None:
        self._make, self._qwen, self._weed, self.store, self._folder = make, qwen, weed, store, folder

    def spec(self, where: str, ranks: int = 1, algorithm: dict[str, Any] = PPO) -> RunSpec:
        nodes = [{"id": "a", "tags": ["rollout", "train"], "ranks": ranks}]
        nodes += [{"id": "c", "tags": ["critic"], "ranks": ranks}] if where == "own" else []
        spec: RunSpec = self._make.make_spec(self._qwen, trainer={"row_tokens": 24})
        settings = {**algorithm, "critic_on": where}
        return RunSpec.model_validate({**spec.model_dump(), "nodes": nodes, "algorithm": settings})

    def gang(self, spec: RunSpec, name: str, role: str = "trainer", found: UpdateResult | None = None) -> Any:
        state = self._make.make_cluster(self._folder / name, self._weed, self.store)
        at = (Path(found.checkpoint_path), found.checkpoint_digest) if found else (None, None)
        ranks = spec.nodes[0].ranks
        return self._make.Gang(spec, state, ranks=ranks, role=role, checkpoint=at[0], checkpoint_digest=at[1])

    def request(self, step: int, lineage: int = 0) -> UpdateRequest:
        shards = [self._make.random_shard(ordinal, step, samples=3) for ordinal in range(3)]
        request: UpdateRequest = self._make.put_batch(self.store, step, shards)
        return request.model_copy(update={"lineage": lineage})


@pytest.fixture
def bench(make: Any, qwen: Path, weed: Weed, column_store: ObjectStore, tmp_path: Path) -> Bench:
    return Bench(make, qwen, weed, column_store, tmp_path)


def critic_of(result: UpdateResult) -> str:
    """sha256 over the critic's weights and moments in a checkpoint."""
    files = sorted((Path(result.checkpoint_path) / "critic").glob("*"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


async def step(bench: Bench, trainer: Any, critic: Any, request: UpdateRequest) -> tuple[UpdateResult, UpdateResult]:
    """Values, the policy's update, the critic's."""
    values = await critic.columns(request)
    policy = await trainer.update(told(request, values))
    return policy, await critic.update(told(request, values, policy.returns))


@pytest.mark.parametrize(("ranks", "algorithm"), [(1, PPO), (1, WITH_KL), (2, PPO)], ids=["ppo", "kl", "two ranks"])
async def test_policy_and_critic_are_those_of_a_run_whose_trainer_holds_both(
    bench: Bench, ranks: int, algorithm: dict[str, Any]
) -> None:
    async with bench.gang(bench.spec("trainer", ranks, algorithm), "together") as gang:
        await gang.ready()
        expected = [await gang.update(bench.request(number)) for number in range(STEPS)]
    spec = bench.spec("own", ranks, algorithm)
    async with bench.gang(spec, "trainer") as trainer, bench.gang(spec, "critic", "critic") as critic:
        await asyncio.gather(trainer.ready(), critic.ready())
        for number in range(STEPS):
            policy, learnt = await step(bench, trainer, critic, bench.request(number))
            assert policy.weights_digest == expected[number].weights_digest
            assert critic_of(learnt) == critic_of(expected[number])
            assert learnt.metrics.value_loss == expected[number].metrics.value_loss
            assert policy.metrics.explained_variance == expected[number].metrics.explained_variance
    assert not (Path(policy.checkpoint_path) / "critic").exists()
    assert expected[-1].metrics.value_loss > 0


@pytest.mark.parametrize("point", ["loading", "critic", "saving", "sealing", "sealed"])
async def test_a_critic_that_is_killed_in_its_update_makes_it_again_from_the_common_checkpoint(
    bench: Bench, point: str
) -> None:
    spec = bench.spec("own")
    async with bench.gang(spec, "trainer") as trainer, bench.gang(spec, "undisturbed", "critic") as critic:
        await asyncio.gather(trainer.ready(), critic.ready())
        request = bench.request(0)
        policy, expected = await step(bench, trainer, critic, request)
    values = written_values(bench, request)
    async with bench.gang(spec, "critic", "critic") as critic:
        await critic.ready()
        critic.processes[0].dies_at.write_text(point)
        with contextlib.suppress(Exception):
            await critic.update(told(request, values, policy.returns))
        assert critic.processes[0].wait(timeout=30) == -9
    async with bench.gang(spec, "critic", "critic") as again:
        await again.ready()
        learnt = await again.update(told(request, values, policy.returns))
        assert critic_of(learnt) == critic_of(expected)
        assert await again.update(told(request, values, policy.returns)) == learnt


def written_values(bench: Bench, request: UpdateRequest) -> ColumnRef:
    """The values that an undisturbed critic has written."""
    (key,) = bench.store.list(f"runs/demo/columns/{request.manifest_digest}-value-")
    return ColumnRef(name="value", key=key, digest=hashlib.sha256(bench.store.get(key)).hexdigest())


async def test_after_a_rewind_both_go_on_from_the_common_checkpoint_and_a_critic_that_is_ahead_is_fenced(
    bench: Bench,
) -> None:
    spec = bench.spec("own")
    async with bench.gang(spec, "trainer") as trainer, bench.gang(spec, "critic", "critic") as critic:
        await asyncio.gather(trainer.ready(), critic.ready())
        common = await step(bench, trainer, critic, bench.request(0))
        expected = await step(bench, trainer, critic, bench.request(1))
        # Step 1 was not committed: the trainer is rewound, the critic lives on and has made the step.
        with pytest.raises(FencedError, match="holds version 2"):
            await critic.columns(bench.request(1, lineage=1))
    async with (
        bench.gang(spec, "trainer", found=common[0]) as trainer,
        bench.gang(spec, "critic", "critic", found=common[1]) as critic,
    ):
        await asyncio.gather(trainer.ready(), critic.ready())
        policy, learnt = await step(bench, trainer, critic, bench.request(1, lineage=1))
    assert policy.weights_digest == expected[0].weights_digest
    assert critic_of(learnt) == critic_of(expected[1])
    assert learnt.checkpoint_path != expected[1].checkpoint_path


async def test_nothing_is_learnt_without_values_and_returns(bench: Bench) -> None:
    spec, request = bench.spec("own"), bench.request(0)
    async with bench.gang(spec, "trainer") as trainer, bench.gang(spec, "critic", "critic") as critic:
        await asyncio.gather(trainer.ready(), critic.ready())
        with pytest.raises(TrainerError, match="came without the column value"):
            await trainer.update(request)
        values = await critic.columns(request)
        with pytest.raises(TrainerError, match="came without the column return"):
            await critic.update(told(request, values))
