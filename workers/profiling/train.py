"""Updates by the trainer's own back end, on random tokens, without shards and checkpoints."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from storage.ports import free_port
from workers.profiling.clock import median_s
from workers.trainer.deepspeed_backend import DeepSpeedBackend
from workers.trainer.launch import Launch
from workers.trainer.objective import Objective
from workers.trainer.packing import MicroBatch, TokenColumns, WeightedTrajectory, pack
from workers.trainer.rows import Segment, Trajectory
from workflows.scheduling.calibration import TrainPoint
from workflows.spec import RunSpec

TRIES = 3


def measure(path: Path, dtype: str, threads: int, loads: Iterable[tuple[int, int]]) -> Iterator[TrainPoint]:
    """One point for each load (sequences, tokens of each)."""
    spec = _spec(path, dtype)
    launch = Launch(
        spec=spec,
        state=path,
        rank=0,
        world_size=1,
        master_port=free_port(),
        control_port=1,
        token=secrets.token_hex(16),
        epoch=0,
        threads=threads,
    )
    backend = DeepSpeedBackend(launch)
    backend.initialize()
    try:
        vocabulary = int(json.loads((path / "config.json").read_text())["vocab_size"])
        objective = Objective(spec.algorithm, temperature=1.0, step=0)
        for count, tokens in loads:
            batches = [_sequence(number, tokens, vocabulary, count) for number in range(count)]
            seconds = median_s(partial(_update, backend, batches, objective), tries=TRIES)
            yield TrainPoint(count * tokens, tokens, seconds)
    finally:
        backend.close()


def _update(backend: DeepSpeedBackend, batches: Sequence[MicroBatch], objective: Objective) -> None:
    backend.accumulate(batches, objective, 1.0)
    backend.update(1.0)


def _sequence(number: int, tokens: int, vocabulary: int, count: int) -> MicroBatch:
    """A prompt of one token, and an answer that is trained whole."""
    ids = np.random.default_rng(number).integers(0, vocabulary, tokens, dtype=np.int32)
    trained = np.arange(tokens - 1, dtype=np.int32)
    logprobs = np.full(len(trained), -math.log(vocabulary), np.float32)
    versions = np.zeros(len(trained), np.int32)
    nothing = np.empty(0, np.int32)
    prompt = Segment((number, 0), ids[:1], nothing, np.empty(0, np.float32), nothing)
    answer = Segment((number, 1), ids[1:], trained, logprobs, versions)
    columns = TokenColumns(
        token_N=trained.astype(np.int64) + number * len(trained),
        engine_logprob_N=logprobs,
        version_N=versions,
        sequence_N=np.full(len(trained), number, np.int64),
        advantage_N=np.ones(len(trained), np.float32),
        weight_N=np.full(len(trained), 1 / (count * len(trained)), np.float32),
    )
    trajectory = Trajectory(f"profile-{number}", (prompt, answer), np.zeros_like(trained), trained - 1)
    return pack([WeightedTrajectory(trajectory, columns)])


def _spec(path: Path, dtype: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "profile",
            "model": {"path": str(path), "dtype": dtype},
            "data": {"path": "none"},
            "reward": {"target": "none:none"},
            "nodes": [{"id": "profile", "tags": ["rollout", "train"]}],
        }
    )
