"""From a shard to trained: batches, manifests, checkpoints, rewinds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.flow import waiting_groups
from storage.books.groups import STALE, ZERO_VARIANCE, end_group
from storage.books.records import TRAIN, BatchClaim, Checkpoint, GroupRef, ManifestRef, RewoundStep, State
from storage.books.runs import lock_run
from storage.books.schema import batches, checkpoints, groups, runs, samples
from storage.errors import ConfigError, FencedError, IntegrityError, NotFoundError
from workflows.scheduling.selection import Selection, ordinal_window

NOT_FINITE = "not_finite"
"""Cause of samples whose loss was no finite number."""
REWOUND = "rewound"
"""State of a batch whose claim moved to a newer lineage."""


class Batches(Part):
    """The end of a sample's life: grouped, claimed, trained."""

    def claim_batch(
        self,
        run: str,
        lineage: int,
        step: int,
        groups: int,
        *,
        drop_zero_variance: bool,
        min_version: int,
        take_partial: bool,
        select: Selection = ordinal_window,
        refill: bool = False,
    ) -> BatchClaim | None:
        """Claim ``groups`` groups for a step; the same (run, lineage, step) gives the same claim.

        ``select`` chooses them among the complete ones, by default in ordinal order; it is called in the transaction.

        Groups started with weights older than ``min_version`` (or with no known
        version at all) end ``filtered(stale)`` and do not count. Groups without
        reward variance count; with ``drop_zero_variance`` they end
        ``filtered(zero_variance)`` and are left out of the claim; with ``refill``
        too they do not count, and the claim waits for others in their place.

        Returns:
            The claim, or None where there are not enough groups yet; ``take_partial`` is content with one.

        Raises:
            FencedError: the run was rewound to a newer lineage.
        """
        with self._db.write() as connection:
            current = lock_run(connection, run, lineage=lineage)
            if _batch(connection, run, lineage, step) is not None:
                return _read_claim(connection, run, lineage, step)
            if lineage > current:
                _set_lineage(connection, run, lineage)
            waiting = _waiting_groups(connection, run)
            stale = [row for row in waiting if row.start_version is None or row.start_version < min_version]
            for row in stale:
                end_group(connection, run, TRAIN, row.ordinal, STALE, lineage=lineage, step=step)
            fresh = [row for row in waiting if row not in stale]
            if refill and drop_zero_variance:
                for row in filter(_without_variance, fresh):
                    end_group(connection, run, TRAIN, row.ordinal, ZERO_VARIANCE, lineage=lineage, step=step)
                fresh = [row for row in fresh if not _without_variance(row)]
            if len(fresh) < (1 if take_partial else groups):
                return None
            fresh = _selected(connection, run, fresh, min(groups, len(fresh)), select)
            _claim(connection, run, lineage, step, fresh, drop_zero_variance)
            return _read_claim(connection, run, lineage, step)

    def waiting_refs(self, run: str, ordinals: Sequence[int]) -> tuple[GroupRef, ...]:
        """Shards of complete groups that no step has claimed; those that one has are left out."""
        waiting = (groups.c.run == run) & (groups.c.stream == TRAIN) & groups.c.ordinal.in_(ordinals)
        query = sa.select(groups).where(waiting, groups.c.state == State.GROUPED)
        members = sa.select(samples).where(samples.c.run == run, samples.c.stream == TRAIN)
        members = members.where(samples.c.ordinal.in_(ordinals), samples.c.state == State.GROUPED)
        with self._db.read() as connection:
            by_ordinal = {row.ordinal: row for row in connection.execute(query)}
            rows = connection.execute(members.order_by(samples.c.ordinal, samples.c.sample)).all()
        found = ((int(ordinal), list(rows)) for ordinal, rows in groupby(rows, key=lambda row: row.ordinal))
        return tuple(_group_ref(by_ordinal[ordinal], rows) for ordinal, rows in found if ordinal in by_ordinal)

    def batch(self, run: str, lineage: int, step: int) -> BatchClaim | None:
        """The claim of a step, if it was made."""
        with self._db.read() as connection:
            if _batch(connection, run, lineage, step) is None:
                return None
            return _read_claim(connection, run, lineage, step)

    def set_manifest(self, run: str, lineage: int, step: int, key: str, digest: str) -> None:
        """Note the manifest object of a claimed step; the same one again changes nothing.

        Raises:
            NotFoundError: the step was not claimed.
            FencedError: the run was rewound to a newer lineage.
            IntegrityError: the step has another manifest already.
        """
        with self._db.write() as connection:
            lock_run(connection, run, lineage=lineage)
            row = _batch(connection, run, lineage, step)
            if row is None:
                raise NotFoundError(f"step {lineage}.{step} of run {run!r} was not claimed: claim its batch first")
            if row.manifest_digest not in (None, digest):
                raise IntegrityError(
                    f"step {lineage}.{step} of run {run!r} has manifest {row.manifest_digest[:12]}, "
                    f"refusing {digest[:12]}"
                )
            values = {"manifest_key": key, "manifest_digest": digest}
            connection.execute(batches.update().where(_at(run, lineage, step)).values(**values))

    def manifest(self, run: str, lineage: int, step: int) -> ManifestRef | None:
        """The manifest of a step, if it was written."""
        with self._db.read() as connection:
            row = _batch(connection, run, lineage, step)
        if row is None or row.manifest_key is None:
            return None
        return ManifestRef(row.manifest_key, row.manifest_digest)

    def commit_checkpoint(
        self,
        run: str,
        lineage: int,
        step: int,
        *,
        version: int,
        path: str,
        digest: str,
        weights_path: str,
        weights_digest: str,
        metrics: Mapping[str, Any],
        dropped: Sequence[str] = (),
        critic_path: str | None = None,
        critic_digest: str | None = None,
    ) -> None:
        """Commit a checkpoint that contains ``step``; every claim up to it becomes trained in the same transaction.

        But samples whose session the update ``dropped`` end ``filtered(not_finite)``. The state of a critic with nodes
        of its own is committed with it, so that both are found again as of the same step. The same checkpoint again
        changes nothing.

        Raises:
            NotFoundError: the step was not claimed.
            FencedError: the run was rewound to a newer lineage.
            IntegrityError: the step has another checkpoint already.
        """
        refs = {"version": version, "path": path, "digest": digest}
        refs |= {"weights_path": weights_path, "weights_digest": weights_digest}
        refs |= {"critic_path": critic_path, "critic_digest": critic_digest}
        with self._db.write() as connection:
            lock_run(connection, run, lineage=lineage)
            found = _checkpoint(connection, run, lineage, step)
            if found is not None:
                _same_checkpoint(found, digest, weights_digest, critic_digest)
                return
            if _batch(connection, run, lineage, step) is None:
                raise NotFoundError(f"step {lineage}.{step} of run {run!r} was not claimed: nothing to commit")
            row: dict[str, Any] = {"run": run, "lineage": lineage, "step": step, **refs, "metrics": dict(metrics)}
            connection.execute(checkpoints.insert().values(**row, created=time.time()))
            untrained = _of_step(samples, run, lineage, step) & samples.c.session.in_(dropped)
            ended = {"state": State.FILTERED, "cause": NOT_FINITE}
            connection.execute(samples.update().where(untrained, samples.c.state == State.CLAIMED).values(**ended))
            for table in (samples, groups, batches):
                taken = (table.c.run == run) & (table.c.lineage == lineage) & (table.c.step <= step)
                claimed = table.c.state == State.CLAIMED
                connection.execute(table.update().where(taken, claimed).values(state=State.TRAINED))

    def latest_checkpoint(self, run: str, *, version: int | None = None) -> Checkpoint | None:
        """The checkpoint to go on from, or the surviving one of a version: the newest lineage's last; None: no such."""
        query = sa.select(checkpoints).where(checkpoints.c.run == run)
        if version is not None:
            query = query.where(checkpoints.c.version == version)
        query = query.order_by(checkpoints.c.lineage.desc(), checkpoints.c.step.desc()).limit(1)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Checkpoint(**row._mapping)

    def rewind(self, run: str, from_lineage: int) -> list[RewoundStep]:
        """Give up ``from_lineage``: its claims that no checkpoint contains move to the next lineage, in step order.

        A repeated call gives the same list, less the steps that were trained since.

        Raises:
            FencedError: the run was rewound past the next lineage already.
        """
        lineage = from_lineage + 1
        with self._db.write() as connection:
            current = lock_run(connection, run)
            if current > lineage:
                raise FencedError(f"run {run!r} is at lineage {current}: lineage {from_lineage} was given up before")
            if current < lineage:
                _move_claims(connection, run, lineage)
                _set_lineage(connection, run, lineage)
            query = sa.select(batches).where(
                batches.c.run == run, batches.c.lineage == lineage, batches.c.state == State.CLAIMED
            )
            rows = connection.execute(query.order_by(batches.c.step)).all()
        return [RewoundStep(row.step, row.manifest_key, row.manifest_digest) for row in rows]


def _at(run: str, lineage: int, step: int) -> sa.ColumnElement[bool]:
    return (batches.c.run == run) & (batches.c.lineage == lineage) & (batches.c.step == step)


def _batch(connection: sa.Connection, run: str, lineage: int, step: int) -> sa.Row[Any] | None:
    return connection.execute(sa.select(batches).where(_at(run, lineage, step))).one_or_none()


def _checkpoint(connection: sa.Connection, run: str, lineage: int, step: int) -> sa.Row[Any] | None:
    here = (checkpoints.c.run == run) & (checkpoints.c.lineage == lineage) & (checkpoints.c.step == step)
    return connection.execute(sa.select(checkpoints).where(here)).one_or_none()


def _same_checkpoint(found: sa.Row[Any], digest: str, weights_digest: str, critic_digest: str | None) -> None:
    if (found.critic_digest or "") != (critic_digest or ""):
        raise IntegrityError(
            f"step {found.lineage}.{found.step} of run {found.run!r} has critic "
            f"{(found.critic_digest or 'none')[:12]}, refusing {(critic_digest or 'none')[:12]}"
        )
    if (found.digest, found.weights_digest) != (digest, weights_digest):
        raise IntegrityError(
            f"step {found.lineage}.{found.step} of run {found.run!r} has checkpoint {found.digest[:12]} "
            f"with weights {found.weights_digest[:12]}, refusing {digest[:12]} with {weights_digest[:12]}"
        )


def _set_lineage(connection: sa.Connection, run: str, lineage: int) -> None:
    connection.execute(runs.update().where(runs.c.run == run).values(lineage=lineage))


def _waiting_groups(connection: sa.Connection, run: str) -> Sequence[sa.Row[Any]]:
    query = sa.select(groups).where(groups.c.run == run, groups.c.stream == TRAIN, groups.c.state == State.GROUPED)
    return connection.execute(query.order_by(groups.c.ordinal)).all()


def _selected(
    connection: sa.Connection, run: str, fresh: list[sa.Row[Any]], wanted: int, select: Selection
) -> list[sa.Row[Any]]:
    by_ordinal = {row.ordinal: row for row in fresh}
    chosen = select(waiting_groups(connection, run, fresh), wanted)
    if len(set(chosen)) != len(chosen) or not 0 < len(chosen) <= wanted or not set(chosen) <= by_ordinal.keys():
        raise ConfigError(
            f"pipeline.selection chose {list(chosen)!r} of the complete groups {sorted(by_ordinal)!r}: it must choose "
            f"between 1 and {wanted} of them, each once"
        )
    return [by_ordinal[ordinal] for ordinal in sorted(chosen)]


def _claim(
    connection: sa.Connection, run: str, lineage: int, step: int, fresh: list[sa.Row[Any]], drop_zero_variance: bool
) -> None:
    rewards = [reward for row in fresh for reward in row.rewards]
    dropped = [row for row in fresh if drop_zero_variance and _without_variance(row)]
    for row in dropped:
        end_group(connection, run, TRAIN, row.ordinal, ZERO_VARIANCE, lineage=lineage, step=step)
    taken = [row.ordinal for row in fresh if row not in dropped]
    for table in (samples, groups):
        here = (table.c.run == run) & (table.c.stream == TRAIN) & table.c.ordinal.in_(taken)
        change = {"state": State.CLAIMED, "lineage": lineage, "step": step}
        connection.execute(table.update().where(here, table.c.state == State.GROUPED).values(**change))
    stale = sa.select(sa.func.count()).select_from(groups)
    stale = stale.where(_of_step(groups, run, lineage, step), groups.c.cause == STALE)
    values = {"run": run, "lineage": lineage, "step": step, "state": State.CLAIMED, "zero_variance": len(dropped)}
    statistics = {"reward_mean": fmean(rewards), "reward_std": pstdev(rewards)}
    connection.execute(batches.insert().values(**values, **statistics, stale=connection.scalar(stale)))


def _without_variance(row: sa.Row[Any]) -> bool:
    return len(set(row.rewards)) == 1


def _of_step(table: sa.Table, run: str, lineage: int, step: int) -> sa.ColumnElement[bool]:
    return (table.c.run == run) & (table.c.lineage == lineage) & (table.c.step == step)


def _read_claim(connection: sa.Connection, run: str, lineage: int, step: int) -> BatchClaim:
    batch = _batch(connection, run, lineage, step)
    assert batch is not None  # noqa: S101 - both callers have just seen it in this transaction
    kept = sa.or_(samples.c.state == State.CLAIMED, samples.c.state == State.TRAINED)
    members = sa.select(samples).where(_of_step(samples, run, lineage, step), samples.c.stream == TRAIN, kept)
    rows = connection.execute(members.order_by(samples.c.ordinal, samples.c.sample)).all()
    shards = sa.select(groups).where(_of_step(groups, run, lineage, step))
    by_ordinal = {row.ordinal: row for row in connection.execute(shards)}
    refs = [
        _group_ref(by_ordinal[ordinal], list(group))
        for ordinal, group in groupby(rows, key=lambda row: int(row.ordinal))
    ]
    statistics = (batch.zero_variance, batch.stale, batch.reward_mean, batch.reward_std)
    return BatchClaim(run, lineage, step, tuple(refs), *statistics)


def _group_ref(group: sa.Row[Any], members: list[sa.Row[Any]]) -> GroupRef:
    return GroupRef(
        ordinal=group.ordinal,
        shard_key=group.shard_key,
        sha256=group.sha256,
        samples=tuple(row.sample for row in members),
        sessions=tuple(row.session for row in members),
        rewards=tuple(row.reward for row in members),
        start_version=group.start_version,
    )


def _move_claims(connection: sa.Connection, run: str, lineage: int) -> None:
    lost = sa.select(batches).where(batches.c.run == run, batches.c.state == State.CLAIMED)
    for row in connection.execute(lost.order_by(batches.c.step)).all():
        connection.execute(batches.update().where(_at(run, row.lineage, row.step)).values(state=REWOUND))
        connection.execute(batches.insert().values(**{**row._mapping, "lineage": lineage}))
    for table in (samples, groups):
        claimed = (table.c.run == run) & (table.c.state == State.CLAIMED)
        connection.execute(table.update().where(claimed).values(lineage=lineage))
