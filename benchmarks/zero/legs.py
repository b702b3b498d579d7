"""What each rank of a gang does: a list of legs, each some steps of one ZeRO stage, from the start or a checkpoint."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.tree.workload import Case, Group
from storage.ports import free_port
from workers.trainer.deepspeed_backend import DeepSpeedBackend
from workers.trainer.launch import Launch
from workers.trainer.objective import Objective
from workers.trainer.packing import MicroBatch, WeightedTrajectory, plan
from workflows.spec import RunSpec

STEPS = 20
_CASES = (
    Case(turns=3, siblings=3, opening=12, prompt=4, answer=4, branches=True),
    Case(turns=1, siblings=4, opening=16, prompt=0, answer=5),
)
_ALGORITHM = {"name": "rloo", "entropy_coefficient": 0.01, "kl": "k3", "kl_coefficient": 0.1}


@dataclass(frozen=True)
class Leg:
    """Steps ``first`` to :data:`STEPS`."""

    stage: int
    first: int = 0
    load: str = ""
    """Checkpoint to start from."""
    save_at: int = -1
    """Step before which a checkpoint is written."""
    save: str = ""
    ahead: bool = False
    """Batches are accumulated in two parts, after one that is dropped."""
    recompute: bool = False
    """With activation checkpointing."""


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    weights: str
    """sha256 of what is published at the end."""


def run_gang(model: Path, ranks: int, legs: Sequence[Leg], folder: Path) -> list[Curve]:
    """Have a gang run all legs; what rank 0 found. Ranks are forked, so that they need not import torch anew."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    place = {"world_size": ranks, "master_port": free_port()}

    def run(rank: int) -> None:
        curves = [_run(leg, model, folder, {**place, "rank": rank}) for leg in legs]
        if rank == 0:
            found.put(curves)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a rank of {ranks} ended with code {process.exitcode}: see what it printed")
    curves: list[Curve] = found.get()
    return curves


def _run(leg: Leg, model: Path, folder: Path, place: dict[str, Any]) -> Curve:
    spec = RunSpec.model_validate(
        {
            "run": "compare-zero",
            "model": {"path": str(model)},
            "data": {"path": "none"},
            "reward": {"target": "none:none"},
            "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            "trainer": {
                "zero_stage": leg.stage,
                "learning_rate": 1e-3,
                "schedule": "cosine",
                "warmup_steps": 4,
                "activation_checkpointing": leg.recompute,
                "row_tokens": 40,
            },
            "algorithm": _ALGORITHM,
            "pipeline": {"steps": STEPS},
        }
    )
    launch = Launch.model_validate(
        {**place, "spec": spec, "state": folder, "token": "x" * 16, "epoch": 0, "control_port": 1}
    )
    backend = DeepSpeedBackend(launch)
    backend.initialize()
    if leg.load:
        backend.load(Path(leg.load))
    losses = []
    for step in range(leg.first, STEPS):
        if step == leg.save_at:
            backend.save(Path(leg.save))
        losses.append((_ahead if leg.ahead else _whole)(backend, spec, step))
    return Curve(losses, _published(backend, folder / "weights"))


def _whole(backend: DeepSpeedBackend, spec: RunSpec, step: int) -> float:
    sums = backend.accumulate(_plan(backend, spec, _rows(step)), Objective(spec.algorithm, 1.0, step), 1.0)
    backend.update(1.0)
    return sums.loss


def _ahead(backend: DeepSpeedBackend, spec: RunSpec, step: int) -> float:
    """Gradients are accumulated times three, as if the batch's mean were over three tokens."""
    rows, objective = _rows(step), Objective(spec.algorithm, 1.0, step)
    backend.accumulate(_plan(backend, spec, _rows(step + 1)), objective, 1.0)
    backend.forget()
    parts = [_plan(backend, spec, part) for part in (rows[:1], rows[1:])]
    loss = sum(backend.accumulate(part, objective, 3.0).loss for part in parts)
    backend.update(1 / 3)
    return loss


def _rows(step: int) -> list[WeightedTrajectory]:
    return Group(_CASES[step % len(_CASES)], seed=step % 4).leaf_rows()


def _plan(backend: DeepSpeedBackend, spec: RunSpec, rows: Sequence[WeightedTrajectory]) -> list[MicroBatch]:
    batches, _ = plan(rows, rank=backend.rank, ranks=backend.world_size, row_tokens=spec.trainer.row_tokens)
    found = backend.reference_logprobs(batches, 1.0)
    return [replace(batch, reference_logprob_N=column) for batch, column in zip(batches, found, strict=True)]


def _published(backend: DeepSpeedBackend, folder: Path) -> str:
    backend.publish(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() if backend.rank == 0 else ""
