"""One rank's life with a back end that counts instead of training: commit, repeat, resume, refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from memory_store import MemoryStore

from storage.errors import ConfigError, FencedError, GangLost, IntegrityError, StorageError, TrainerError
from storage.weights import WeightsStore
from workers.trainer.batch import Batch, read_batch
from workers.trainer.checkpoint import CheckpointFolder
from workers.trainer.launch import Launch
from workers.trainer.messages import UpdateRequest
from workers.trainer.objective import Objective, StepSums, ValueObjective
from workers.trainer.packing import MicroBatch
from workers.trainer.trainer import Trainer


class CountingBackend:
    """Its only weight is the sum of the trained ids. ``fail`` names the method that raises once."""

    rank = 0
    world_size = 1
    compute_dtype = "float32"
    packs = True
    learning_rate = 0.01

    def __init__(self) -> None:
        self.value = 0
        self.updates = 0
        self.held = 0
        self.fail = ""
        self.closed = False
        self.moves: list[str] = []

    def initialize(self) -> None:
        self._maybe_fail("initialize")

    def accumulate(self, batches: Sequence[MicroBatch], objective: Objective, scale: float) -> StepSums:
        self._maybe_fail("accumulate")
        self.held += sum(int(batch.target_N.sum()) for batch in batches)
        tokens = float(sum((batch.weight_N > 0).sum() for batch in batches))
        return StepSums(loss=1.0, tokens=tokens)

    def update(self, scale: float) -> float:
        self._maybe_fail("update")
        self.updates += 1
        self.moves.append("update")
        self.value, self.held = self.value + self.held, 0
        return 0.5

    def forget(self) -> None:
        self.held = 0

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return []

    def reference_logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[npt.NDArray[np.float32]]:
        return []

    def values(self, batches: Sequence[MicroBatch]) -> list[npt.NDArray[np.float32]]:
        return []

    def update_critic(self, batches: Sequence[MicroBatch], objective: ValueObjective) -> float:
        return 0.0

    def save(self, folder: Path) -> None:
        self._maybe_fail("save")
        (folder / "value").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / "value").read_text())

    def publish(self, folder: Path) -> None:
        self._maybe_fail("publish")
        (folder / "model.safetensors").write_text(str(self.value))

    def park(self) -> None:
        self.moves.append("park")

    def unpark(self) -> None:
        self.moves.append("unpark")

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.closed = True

    def _maybe_fail(self, name: str) -> None:
        if self.fail == name:
            self.fail = ""
            raise OSError("no space left on device") if name in ("save", "publish") else RuntimeError("broken")


@dataclass
class World:
    make: Any
    root: Path
    store: MemoryStore = field(default_factory=MemoryStore)

    def request(self, step: int, *, seed: int = 1, lineage: int = 0, shards: int = 2) -> UpdateRequest:
        batch = [self.make.random_shard(ordinal, seed + 10 * step) for ordinal in range(shards)]
        request: UpdateRequest = self.make.put_batch(self.store, step, batch, lineage=lineage)
        return request

    def trainer(self, *, checkpoint: Path | None = None, **changes: Any) -> tuple[Trainer, CountingBackend]:
        spec = self.make.make_spec(Path("/model"), trainer={"keep_checkpoints": 2})
        launch = Launch(
            spec=spec,
            state=self.root,
            rank=0,
            world_size=1,
            master_port=1,
            control_port=1,
            token="x" * 16,
            epoch=1,
            checkpoint=checkpoint,
            **changes,
        )
        backend = CountingBackend()

        store: Any = self.store  # it only gets and puts

        def read(
            request: UpdateRequest, without: frozenset[str] = frozenset(), dropped: frozenset[str] = frozenset()
        ) -> Batch:
            return read_batch(store, request, "demo", spec.algorithm, without, dropped)

        folders = CheckpointFolder(self.root / "checkpoints"), WeightsStore(self.root / "weights")
        return Trainer(launch, backend, read, *folders, store), backend


@pytest.fixture
def world(make: Any, tmp_path: Path) -> World:
    return World(make, tmp_path)


def test_a_step_turns_version_s_into_s_plus_1_and_publishes_it(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    for step in range(2):
        result = trainer.update(world.request(step))
        assert (result.step, result.version) == (step, step + 1)
        assert WeightsStore(world.root / "weights").verify(Path(result.weights_path)) == result.weights_digest
        assert (Path(result.checkpoint_path) / "value").read_text() == str(backend.value)
    assert (trainer.progress.version, trainer.progress.phase) == (2, "ready")


def test_metrics_say_what_was_trained(world: World, make: Any) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    metrics = trainer.update(world.request(0)).metrics
    assert (metrics.groups, metrics.rows, metrics.optimizer_steps, metrics.tokens_masked) == (2, 10, 1, 0)
    assert 0 < metrics.tokens < metrics.tokens_computed < metrics.tokens_in_rows
    assert metrics.grad_norm == 0.5
    assert trainer.update(world.request(1)).metrics.staleness_max == 1


def test_a_repeated_step_returns_the_committed_result(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    first = trainer.update(world.request(0))
    assert trainer.update(world.request(0)) == first
    assert backend.updates == 1


def test_a_step_that_was_committed_before_a_restart_is_not_trained_again(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    trainer.update(world.request(0))
    first = trainer.update(world.request(1))

    # the checkpoint of step 1 was sealed, but the ledger did not hear of it: the gang restarts from step 0's
    again, backend = world.trainer(checkpoint=world.root / "checkpoints" / "l0-s0")
    again.start()
    assert again.update(world.request(1)) == first
    assert backend.updates == 0
    assert again.progress.version == 2


def test_a_kill_between_checkpoint_and_publication_publishes_the_same_weights(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    backend.fail = "publish"
    with pytest.raises(GangLost, match=r"no space left"):
        trainer.update(world.request(0))

    again, backend = world.trainer()
    again.start()
    result = again.update(world.request(0))
    assert backend.updates == 0
    assert Path(result.weights_path, "model.safetensors").read_text() == str(backend.value)


def test_a_kill_before_the_checkpoint_trains_the_step_again_with_the_same_result(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    backend.fail = "save"
    with pytest.raises(GangLost, match=r"no space left"):
        trainer.update(world.request(0))
    assert backend.closed
    assert trainer.progress.phase == "failed"

    again, again_backend = world.trainer()
    again.start()
    again.update(world.request(0))
    assert again_backend.value == backend.value


def test_a_new_lineage_trains_its_steps_anew(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    first = trainer.update(world.request(0))
    again, backend = world.trainer()
    again.start()
    replayed = again.update(world.request(0, lineage=1))
    assert backend.updates == 1
    assert replayed.checkpoint_path != first.checkpoint_path
    assert replayed.weights_digest == first.weights_digest


def test_an_empty_batch_advances_the_version_without_a_step(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    before = trainer.update(world.request(0))
    after = trainer.update(world.request(1, shards=0))
    assert backend.updates == 1
    assert (after.version, after.weights_digest) == (2, before.weights_digest)
    assert (after.metrics.optimizer_steps, after.metrics.tokens) == (0, 0)


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_from_another_version_is_refused(world: World, step: int) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    trainer.update(world.request(0))
    with pytest.raises(FencedError, match=rf"step {step} starts from weight version {step}, .* holds version 1"):
        trainer.update(world.request(step, lineage=1))
    assert trainer.progress.phase == "ready"


def test_another_batch_for_a_committed_step_is_refused(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    trainer.update(world.request(0, seed=1))
    with pytest.raises(IntegrityError, match=r"use a new lineage"):
        trainer.update(world.request(0, seed=2))


def test_a_committed_step_that_continues_another_state_is_refused(world: World) -> None:
    one, _ = world.trainer()
    one.start()
    one.update(world.request(0))
    one.update(world.request(1))
    # a second history up to version 1, under another lineage
    other, _ = world.trainer()
    other.start()
    other.update(world.request(0, lineage=1, seed=7))
    with pytest.raises(IntegrityError, match=r"continues another state"):
        other.update(world.request(1, lineage=0))


def test_an_object_store_that_is_away_changes_nothing(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    request = world.request(0)
    world.store.away = True
    with pytest.raises(StorageError, match=r"cannot read the batch: the object store is away"):
        trainer.update(request)
    assert trainer.progress.phase == "ready"
    world.store.away = False
    assert trainer.update(request).version == 1
    assert backend.updates == 1


def test_a_manifest_of_another_step_is_refused(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    wrong = world.request(3).model_copy(update={"step": 0})
    with pytest.raises(IntegrityError, match=r"is of step 3 of run demo"):
        trainer.update(wrong)


def test_greedy_samples_are_refused(world: World) -> None:
    from storage.manifests import Manifest, write_manifest

    trainer, _ = world.trainer()
    trainer.start()
    ref = write_manifest(world.store, Manifest("demo", 0, 0, (), temperature=0.0))  # type: ignore[arg-type]
    request = UpdateRequest(lineage=0, step=0, manifest_key=ref.key, manifest_digest=ref.digest, epoch=1)
    with pytest.raises(ConfigError, match=r"temperature 0"):
        trainer.update(request)


def test_a_failure_in_training_is_a_lost_gang(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    backend.fail = "update"
    with pytest.raises(GangLost, match=r"RuntimeError: broken"):
        trainer.update(world.request(0))
    assert trainer.progress.phase == "failed"


def test_a_damaged_checkpoint_is_not_resumed(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    path = Path(trainer.update(world.request(0)).checkpoint_path)
    (path / "value").write_text("1")
    again, _ = world.trainer(checkpoint=path)
    with pytest.raises(IntegrityError, match=r"damaged"):
        again.start()


def test_a_checkpoint_of_another_gang_is_not_resumed(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    result = trainer.update(world.request(0))
    path = Path(result.checkpoint_path)
    wrong, _ = world.trainer(checkpoint=path, checkpoint_digest="f" * 64)
    with pytest.raises(IntegrityError, match=r"expected f"):
        wrong.start()
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "compute_dtype": "bfloat16"}))
    other, _ = world.trainer(checkpoint=path)
    with pytest.raises(ConfigError, match=r"compute_dtype bfloat16, this gang has float32"):
        other.start()


def test_a_checkpoint_of_a_gang_of_another_size_is_resumed(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    path = Path(trainer.update(world.request(0)).checkpoint_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "world_size": 8}))
    files = json.loads((path / "manifest.json").read_text())
    files["state.json"] = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(files))
    other, backend = world.trainer(checkpoint=path)
    other.start()
    assert (str(backend.value), other.progress.version) == ((path / "value").read_text(), 1)


def test_old_checkpoints_go_when_a_step_starts(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    for step in range(4):
        trainer.update(world.request(step))
    kept = sorted(path.name for path in (world.root / "checkpoints").iterdir())
    assert kept == ["l0-s1", "l0-s2", "l0-s3"]  # two up to the held one, and the one that was written since


def part_of(world: World, *ordinals: int, step: int = 0) -> UpdateRequest:
    shards = [world.make.random_shard(ordinal, 1 + 10 * step) for ordinal in ordinals]
    request: UpdateRequest = world.make.put_batch(world.store, step, shards)
    return request


def trained_value(world: World, *parts: UpdateRequest) -> tuple[int, int]:
    trainer, backend = world.trainer()
    trainer.start()
    for part in parts:
        trainer.accumulate(part)
    result = trainer.update(world.request(0, shards=3))
    assert (result.metrics.groups, result.metrics.optimizer_steps) == (3, 1)
    return backend.value, backend.updates


def test_groups_accumulated_ahead_are_trained_once_with_the_rest_of_their_batch(world: World, tmp_path: Path) -> None:
    whole = trained_value(World(world.make, tmp_path / "whole"))
    assert trained_value(world, part_of(world, 0), part_of(world, 0), part_of(world, 1, 2)) == whole
    assert trained_value(World(world.make, tmp_path / "b", world.store), part_of(world, 2)) == whole


def test_a_head_start_on_a_group_that_the_batch_does_not_hold_is_dropped(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    assert trainer.accumulate(part_of(world, 0, 7)) == 2
    trainer.update(world.request(0, shards=3))
    other, plain = World(world.make, world.root / "plain", world.store).trainer()
    other.start()
    other.update(world.request(0, shards=3))
    assert (backend.value, backend.held) == (plain.value, 0)


def test_a_head_start_on_another_step_is_refused(world: World) -> None:
    trainer, _ = world.trainer()
    trainer.start()
    with pytest.raises(FencedError, match="step 1 is not next"):
        trainer.accumulate(part_of(world, 0, step=1))


def test_a_parked_trainer_keeps_its_state_and_trains_only_when_it_has_its_device_again(world: World) -> None:
    trainer, backend = world.trainer()
    trainer.start()
    trainer.unpark()  # it is not parked: nothing to do
    result = trainer.update(world.request(0))
    for _ in range(2):
        trainer.park()
    assert trainer.progress.phase == "parked"
    assert trainer.update(world.request(0)) == result, "what is committed is told by a parked trainer too"
    with pytest.raises(TrainerError, match=r"parked"):
        trainer.update(world.request(1))
    with pytest.raises(TrainerError, match=r"parked"):
        trainer.accumulate(world.request(1))
    for _ in range(2):
        trainer.unpark()
    trainer.update(world.request(1))
    assert backend.moves == ["update", "park", "unpark", "update"]
