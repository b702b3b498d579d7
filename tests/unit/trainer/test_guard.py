"""A batch that cannot be trained changes nothing, is told with all that made it, and leaves the run where it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_store import MemoryStore
from table_backend import TableBackend

from storage.errors import BadBatch, GangLost, OutOfMemory
from storage.weights import WeightsStore
from workers.trainer.batch import Batch, read_batch
from workers.trainer.checkpoint import CheckpointFolder
from workers.trainer.launch import Launch
from workers.trainer.messages import UpdateRequest
from workers.trainer.scripted_loss import NO_CPU_MEMORY, NO_GPU_MEMORY, NO_NUMBER, NO_PYTHON_MEMORY, NO_SLOPE
from workers.trainer.trainer import Trainer

SCRIPTED = "workers.trainer.scripted_loss:loss"
SAMPLES = 4


@dataclass
class World:
    make: Any
    root: Path
    store: MemoryStore = field(default_factory=MemoryStore)

    def trainer(
        self, name: str, *, row_tokens: int = 16, on_bad_batch: str = "stop", **algorithm: Any
    ) -> tuple[Trainer, TableBackend]:
        """A trainer of its own, with a loss whose faults the batches script."""
        spec = self.make.make_spec(
            Path("/model"),
            trainer={"row_tokens": row_tokens, "on_bad_batch": on_bad_batch},
            algorithm={"loss": SCRIPTED, **algorithm},
        )
        launch = Launch(
            spec=spec, state=self.root, rank=0, world_size=1, master_port=1, control_port=1, token="x" * 16, epoch=1
        )
        backend = TableBackend()
        store: Any = self.store  # it only gets and puts

        def read(
            request: UpdateRequest, without: frozenset[str] = frozenset(), dropped: frozenset[str] = frozenset()
        ) -> Batch:
            return read_batch(store, request, "demo", spec.algorithm, without, dropped)

        folders = CheckpointFolder(self.root / name / "checkpoints"), WeightsStore(self.root / name / "weights")
        trainer = Trainer(launch, backend, read, *folders, store)
        trainer.start()
        return trainer, backend

    def batch(
        self, step: int = 0, *, fault: float = -4.0, at: str = "s0.1", without: Sequence[str] = (), groups: int = 2
    ) -> UpdateRequest:
        """Groups of four sessions with two turns; ``fault``: the log-prob of a token in the second turn of ``at``."""
        shards = []
        for ordinal in range(groups):
            shard = self.make.ShardBuilder(ordinal)
            root = shard.prompt(-1, [1, 2, 3 + ordinal])
            for sample in range(SAMPLES):
                name = f"s{ordinal}.{sample}"
                if name in without:
                    continue
                logprobs = [-4.0, fault if name == at else -4.0, -4.0]
                first = shard.completion(root, [10 + sample, 20 + step], session=name)
                second = shard.prompt(first, [30])
                last = shard.completion(second, [40 + sample, 41, 42], session=name, logprobs=logprobs)
                shard.session(name, reward=float(sample), leaves=[last])
            shards.append(shard.build())
        request: UpdateRequest = self.make.put_batch(self.store, step, shards)
        return request


@pytest.fixture
def world(make: Any, tmp_path: Path) -> World:
    return World(make, tmp_path)


@pytest.mark.parametrize("fault", [NO_NUMBER, NO_SLOPE])
def test_a_number_that_is_not_finite_stops_the_step_before_anything_has_changed(world: World, fault: float) -> None:
    trainer, backend = world.trainer("a")
    before = backend.policy.detach().clone()
    request = world.batch(fault=fault)
    with pytest.raises(BadBatch) as error:
        trainer.update(request)
    for part in (
        "step 0 cannot be trained: the loss of 1 token, or its gradient, is not finite",
        "session s0.1 (trained generation 2)",
        request.manifest_key,
        "trainer.on_bad_batch: skip",
    ):
        assert part in str(error.value)
    assert torch.equal(backend.policy, before)
    assert (trainer.progress.phase, trainer.progress.version) == ("ready", 0)

    # The step can be made as soon as its batch is in order, and its weights are as if nothing had been.
    undisturbed, plain = world.trainer("plain")
    good = world.batch()
    assert trainer.update(good).weights_digest == undisturbed.update(good).weights_digest
    assert torch.equal(backend.policy, plain.policy)


def test_the_micro_batch_is_named(world: World) -> None:
    trainer, _ = world.trainer("a", row_tokens=1)
    with pytest.raises(BadBatch, match=r"in micro-batch \d of 8 on rank 0 \(8 tokens\), made by session s1\.2"):
        trainer.update(world.batch(fault=NO_NUMBER, at="s1.2"))


@pytest.mark.parametrize("fault", [NO_NUMBER, NO_SLOPE])
def test_a_sample_that_cannot_be_trained_is_left_out_if_the_run_says_so(world: World, fault: float) -> None:
    trainer, backend = world.trainer("skips", on_bad_batch="skip")
    request = world.batch(fault=fault)
    result = trainer.update(request)
    assert result.dropped == ("s0.1",)
    assert (result.metrics.sessions_dropped, result.metrics.optimizer_steps) == (1, 1)
    assert trainer.update(request) == result

    # as if the sample had never been
    other, plain = world.trainer("plain")
    without = other.update(world.batch(without=["s0.1"]))
    assert without.dropped == ()
    assert torch.equal(backend.policy, plain.policy)
    assert result.metrics.tokens == without.metrics.tokens


def test_what_was_left_out_is_remembered_with_the_checkpoint(world: World) -> None:
    trainer, _ = world.trainer("same", on_bad_batch="skip")
    request = world.batch(fault=NO_NUMBER)
    result = trainer.update(request)
    again, _ = world.trainer("same")  # whatever the setting is now: the step is committed
    assert again.update(request) == result


def test_samples_are_not_blamed_for_weights_that_give_no_numbers(world: World) -> None:
    trainer, backend = world.trainer("a", on_bad_batch="skip")
    backend.policy = torch.full_like(backend.policy, math.nan).requires_grad_()
    with pytest.raises(BadBatch, match=r"every session of the batch.*look at the weights"):
        trainer.update(world.batch())


def test_a_later_optimizer_step_that_fails_undoes_the_earlier_ones(world: World) -> None:
    trainer, backend = world.trainer("a", minibatches=2, old_logprobs="engine")
    trainer.update(world.batch(0))
    before = backend.policy.detach().clone()
    with pytest.raises(BadBatch, match=r"session s1\.0"):
        trainer.update(world.batch(1, fault=NO_NUMBER, at="s1.0"))  # in the second of two
    assert torch.equal(backend.policy, before)
    assert trainer.progress.phase == "ready"


def test_before_the_first_checkpoint_earlier_optimizer_steps_are_undone_by_a_restart(world: World) -> None:
    trainer, _ = world.trainer("a", minibatches=2, old_logprobs="engine", on_bad_batch="skip")
    with pytest.raises(BadBatch, match=r"The first update cannot be undone"):
        trainer.update(world.batch(0, fault=NO_NUMBER, at="s1.0"))
    assert trainer.progress.phase == "failed"


@pytest.mark.parametrize("on_bad_batch", ["stop", "skip"])
def test_a_head_start_on_a_bad_sample_is_dropped_and_judged_with_its_step(world: World, on_bad_batch: str) -> None:
    trainer, backend = world.trainer("a", on_bad_batch=on_bad_batch)
    request = world.batch(fault=NO_NUMBER)
    assert trainer.accumulate(request) == 0
    assert not backend.gradient.any()
    if on_bad_batch == "stop":
        with pytest.raises(BadBatch, match=r"s0\.1"):
            trainer.update(request)
    else:
        assert trainer.update(request).dropped == ("s0.1",)


def test_a_head_start_whose_rest_is_bad_is_made_anew_without_the_bad_sample(world: World) -> None:
    trainer, backend = world.trainer("a", on_bad_batch="skip")
    assert trainer.accumulate(world.batch(groups=1)) == 1
    assert trainer.update(world.batch(fault=NO_NUMBER, at="s1.3")).dropped == ("s1.3",)
    other, plain = world.trainer("plain")
    other.update(world.batch(without=["s1.3"]))
    assert torch.equal(backend.policy, plain.policy)


@pytest.mark.parametrize("fault", [NO_GPU_MEMORY, NO_CPU_MEMORY, NO_PYTHON_MEMORY])
def test_a_lack_of_memory_says_where_and_what_to_set(world: World, fault: float) -> None:
    trainer, _ = world.trainer("a", on_bad_batch="skip")
    with pytest.raises(OutOfMemory) as error:
        trainer.update(world.batch(fault=fault))
    assert "step 0: rank 0 ran out of memory (train and save, micro-batch " in str(error.value)
    assert "set trainer.row_tokens below " in str(error.value)
    assert "or trainer.activation_checkpointing: true" in str(error.value)
    assert trainer.progress.phase == "failed", "the ranks start anew, with other settings"


def test_a_trajectory_that_is_too_long_by_itself_is_not_cured_by_smaller_rows(world: World) -> None:
    trainer, _ = world.trainer("a", row_tokens=4)
    with pytest.raises(OutOfMemory, match=r"lower model\.max_context \(it is one trajectory: trainer\.row_tokens, 4"):
        trainer.update(world.batch(fault=NO_GPU_MEMORY))


def test_other_failures_are_not_taken_for_a_lack_of_memory(world: World) -> None:
    trainer, backend = world.trainer("a")
    backend.policy = torch.zeros(3, 3).requires_grad_()  # ids are out of its range
    with pytest.raises(GangLost, match="IndexError"):
        trainer.update(world.batch())
