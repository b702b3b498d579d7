"""Reads the batch of a step from the object store: manifest, shards, advantages, weights. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from algorithms.aggregation import aggregation_weights
from algorithms.corrections import fresh
from storage.columns import Column, Places, decode_column, look_up
from storage.errors import ConfigError, IntegrityError
from storage.manifests import Manifest, read_manifest
from storage.objects import ObjectStore
from storage.shards import decode
from workers.trainer.credit import Evidence, assign_credit, gather_evidence
from workers.trainer.messages import UpdateRequest
from workers.trainer.packing import TokenColumns, WeightedTrajectory
from workers.trainer.rows import Floats, GroupRows, Trajectory, group_rows
from workflows.spec import AlgorithmSpec


@dataclass(frozen=True)
class Batch:
    """All trajectories of a step, for all ranks."""

    minibatches: tuple[tuple[WeightedTrajectory, ...], ...]
    """Trajectories of each optimizer step of an epoch; none if no token can be trained."""
    evidence: Evidence
    temperature: float
    """At which the tokens were sampled."""
    step: int
    """Also the weight version before the update."""
    groups: int
    masked: int
    """Completion tokens that stay context."""
    shards: frozenset[str] = frozenset()
    """Digests of its groups' shards."""
    given: Mapping[str, Floats] = field(default_factory=dict)
    """By name of a column, what a model that is not the gang's own says of each trained token, in order."""

    @property
    def rows(self) -> tuple[WeightedTrajectory, ...]:
        return tuple(row for part in self.minibatches for row in part)

    @property
    def trained(self) -> int:
        """Tokens with a share in the loss."""
        return sum(int((row.columns.weight_N > 0).sum()) for row in self.rows)

    def session_tokens(self) -> npt.NDArray[np.int64]:
        """Trained tokens of each session that has any."""
        counts = np.bincount(self.evidence.session_N.numpy())
        return counts[counts > 0]

    def columns(self) -> TokenColumns:
        """Of all trained tokens, in order."""
        return TokenColumns.concatenate([row.columns for row in self.rows])

    def places(self) -> Places:
        """Task, span and index in the span of each trained token, in order; shape (M, 3)."""
        segments = [segment for row in self.rows for segment in row.trajectory.segments if len(segment.trained)]
        parts = [np.column_stack([np.tile(s.key, (len(s.trained), 1)), s.trained]) for s in segments]
        return np.concatenate([np.empty((0, 3), np.int64), *parts]).astype(np.int64)

    def versions(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Weight version of each trained token."""
        return self.columns().version_N if self.rows else np.empty(0, np.int32)


def read_batch(
    store: ObjectStore,
    request: UpdateRequest,
    run: str,
    algorithm: AlgorithmSpec,
    without: frozenset[str] = frozenset(),
    dropped: frozenset[str] = frozenset(),
) -> Batch:
    """Fetch, verify, weigh; groups whose shard's digest is in ``without`` and ``dropped`` sessions are left out.

    Every rank reads all shards: work is balanced over ranks by lengths, which only shards tell, and token ids are
    small beside what a rank computes from them.

    Raises :class:`IntegrityError` if bytes differ from their digest, the manifest is of another step or a column of
    another batch, :class:`StorageError` or :class:`DeadlineError` if the store fails.
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
    oldest = 0
    if algorithm.token_staleness is not None and algorithm.stale_tokens == "drop":
        oldest = manifest.step - algorithm.token_staleness
    wanted = [g for g in manifest.groups if g.sha256 not in without]
    groups = [
        group_rows(decode(store.get(g.key, sha256=g.sha256)), sessions, oldest=oldest)
        for g in wanted
        if (sessions := [name for name in g.sessions if name not in dropped])
    ]
    batch = replace(weigh(groups, manifest, algorithm), shards=frozenset(g.sha256 for g in wanted))
    return replace(batch, given=_given(store, request, batch.places())) if request.columns else batch


def _given(store: ObjectStore, request: UpdateRequest, place_M3: Places) -> dict[str, Floats]:
    """A column may have been written in shares."""
    found: dict[str, list[Column]] = {}
    for ref in request.columns:
        found.setdefault(ref.name, []).append(decode_column(store.get(ref.key, sha256=ref.digest)))
    return {name: look_up(parts, place_M3) for name, parts in found.items()}


def weigh(groups: Iterable[GroupRows], manifest: Manifest, algorithm: AlgorithmSpec) -> Batch:
    """Give each trained token its share of the loss and, unless a model is asked for it first, its advantage."""
    groups = list(groups)
    evidence = gather_evidence(groups)
    parts: list[tuple[WeightedTrajectory, ...]] = []
    first = 0
    for part in deal(groups, algorithm.minibatches):
        rows = [row for group in part for row in group.trajectories]
        if rows:
            parts.append(_weighted(rows, first, evidence, manifest.step, algorithm))
            first += sum(len(row.turns) for row in rows)
    masked = sum(group.masked for group in groups)
    batch = Batch(tuple(parts), evidence, manifest.temperature, manifest.step, len(groups), masked)
    if not parts or asks_models(algorithm):
        return batch
    weight_N = torch.from_numpy(batch.columns().weight_N)
    return with_advantages(batch, assign_credit(evidence, algorithm, weight_N).advantage_N.numpy())


def asks_models(algorithm: AlgorithmSpec) -> bool:
    """Whether advantages depend on values or on the KL to a reference."""
    return algorithm.has_critic or (algorithm.kl != "none" and algorithm.kl_in == "reward")


def with_advantages(batch: Batch, advantage_N: Floats) -> Batch:
    """The same batch with an advantage for each trained token, in order."""

    def filled(row: WeightedTrajectory) -> WeightedTrajectory:
        columns = replace(row.columns, advantage_N=advantage_N[row.columns.token_N])
        return WeightedTrajectory(row.trajectory, columns)

    return replace(batch, minibatches=tuple(tuple(map(filled, part)) for part in batch.minibatches))


def deal(groups: Sequence[GroupRows], parts: int) -> list[Sequence[GroupRows]]:
    """Whole groups, in order, to as equal parts as can be; no part is empty.

    Samples of a group share their prompt, and a session's tokens belong in one optimizer step.
    """
    parts = min(parts, len(groups))
    ends = [len(groups) * part // parts for part in range(parts + 1)] if parts else []
    return [groups[start:end] for start, end in pairwise(ends)]


def _weighted(
    rows: Sequence[Trajectory], first: int, evidence: Evidence, step: int, algorithm: AlgorithmSpec
) -> tuple[WeightedTrajectory, ...]:
    """The trajectories of one optimizer step, which trains tokens ``first`` and following."""
    trained = [len(row.turns) for row in rows]
    session_N = evidence.session_N[first : first + sum(trained)]
    tokens_S = torch.bincount(session_N, minlength=len(evidence.reward_S))
    weight_S = aggregation_weights(
        tokens_S, aggregation=algorithm.aggregation_used, length=algorithm.aggregation_length
    )
    weight_N = weight_S[session_N].numpy()
    sequence_N = (evidence.session_N if algorithm.sequence == "session" else evidence.turn_N).numpy()
    weighted = []
    for row, (start, end) in zip(rows, pairwise(np.cumsum([0, *trained])), strict=True):
        columns = TokenColumns(
            token_N=np.arange(first + start, first + end),
            engine_logprob_N=row.engine_logprobs,
            version_N=row.versions,
            sequence_N=sequence_N[first + start : first + end],
            advantage_N=np.zeros(end - start, np.float32),
            weight_N=weight_N[start:end],
        )
        weighted.append(WeightedTrajectory(row, _without_stale(columns, step, algorithm.token_staleness)))
    return tuple(weighted)


def _without_stale(columns: TokenColumns, step: int, cap: int | None) -> TokenColumns:
    if cap is None:
        return columns
    keep_N = fresh(torch.from_numpy(columns.version_N), step=step, cap=cap).numpy()
    return replace(columns, weight_N=np.where(keep_N, columns.weight_N, np.float32(0)))
