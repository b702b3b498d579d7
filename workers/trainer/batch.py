"""Reads the batch of a step from the object store: manifest, shards, advantages, weights. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.advantages import group_advantages
from algorithms.policy_loss import aggregation_weights
from storage.errors import ConfigError, IntegrityError
from storage.manifests import Manifest, read_manifest
from storage.objects import ObjectStore
from storage.shards import decode
from workers.trainer.messages import UpdateRequest
from workers.trainer.packing import WeightedTrajectory
from workers.trainer.rows import GroupRows, group_rows
from workflows.spec import AlgorithmSpec


@dataclass(frozen=True)
class Batch:
    """All trajectories of a step, for all ranks."""

    rows: tuple[WeightedTrajectory, ...]
    """Empty if no token can be trained."""
    temperature: float
    """At which the tokens were sampled."""
    groups: int
    masked: int
    """Completion tokens that stay context."""

    def versions(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Weight version of each trained token."""
        versions = [row.columns.version_N for row in self.rows]
        return np.concatenate(versions) if versions else np.empty(0, np.int32)


def read_batch(store: ObjectStore, request: UpdateRequest, run: str, algorithm: AlgorithmSpec) -> Batch:
    """Fetch, verify, weigh.

    Every rank reads all shards: work is balanced over ranks by lengths, which only shards tell, and token ids are
    small beside what a rank computes from them.

    Raises :class:`IntegrityError` if bytes differ from their digest or the manifest is of another step,
    :class:`StorageError` or :class:`DeadlineError` if the store fails.
    """
    manifest = read_manifest(store, request.manifest_key, request.manifest_digest)
    if (manifest.run, manifest.step) != (run, request.step):
        raise IntegrityError(
            f"manifest {request.manifest_key} is of step {manifest.step} of run {manifest.run}, "
            f"asked for was step {request.step} of run {run}"
        )
    if manifest.temperature <= 0:
        raise ConfigError(
            "sampling.temperature 0 is greedy: such samples have no log-prob to train on; use a value above 0"
        )
    groups = [group_rows(decode(store.get(g.key, sha256=g.sha256)), g.sessions) for g in manifest.groups]
    return weigh(groups, manifest, algorithm)


def weigh(groups: Iterable[GroupRows], manifest: Manifest, algorithm: AlgorithmSpec) -> Batch:
    """Give each trajectory its session's advantage and its tokens' share of the batch loss."""
    groups = list(groups)
    tokens: Counter[str] = Counter()
    for group in groups:
        for row in group.trajectories:
            tokens[row.session] += row.trained
    names = list(tokens)
    counts_S = torch.tensor([tokens[name] for name in names], dtype=torch.int64)
    weight_S = aggregation_weights(counts_S, aggregation=algorithm.aggregation)
    weights = dict(zip(names, weight_S.tolist(), strict=True))
    rows: list[WeightedTrajectory] = []
    first = 0
    for group in groups:
        advantages = _advantages(group, algorithm)
        for row in group.trajectories:
            name = row.session
            scalars = {"advantage": advantages[name], "weight": weights[name]}
            rows.append(WeightedTrajectory.of(row, first=first, sequence=names.index(name), **scalars))
            first += row.trained
    return Batch(tuple(rows), manifest.temperature, len(groups), sum(group.masked for group in groups))


def _advantages(group: GroupRows, algorithm: AlgorithmSpec) -> dict[str, float]:
    reward_S = torch.tensor(list(group.rewards.values()), dtype=torch.float64)
    try:
        advantage_S = group_advantages(reward_S, divide_by_std=algorithm.advantage_std)
    except ValueError as error:
        raise IntegrityError(f"group of sessions {', '.join(group.rewards)}: {error}") from error
    return dict(zip(group.rewards, advantage_S.tolist(), strict=True))
