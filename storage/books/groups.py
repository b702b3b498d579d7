"""From a finished session to a shard: rewards, complete groups, evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.records import (
    PENDING,
    TERMINAL,
    TRAIN,
    EvalResult,
    GroupRows,
    SampleKey,
    SampleRow,
    ScoreClaim,
    State,
)
from storage.books.runs import in_stream, lock_run, stream_row
from storage.books.samples import get_sample, require, row_of, set_sample
from storage.books.schema import groups, samples, sessions, streams
from storage.books.sessions import close_sessions
from storage.errors import FencedError, IntegrityError, RewardError

EVALUATION = "evaluation"
"""Cause with which scored evaluation samples end."""

ZERO_VARIANCE = "zero_variance"
"""Cause with which groups end whose rewards are all equal: they teach nothing."""

STALE = "stale"
"""Cause with which groups end that were started with weights too old for the step."""


class Groups(Part):
    """The middle of a sample's life: finished, scored, grouped."""

    def claim_scores(self, run: str, worker: str, limit: int, lease_s: float) -> list[ScoreClaim]:
        """Hand out finished samples of all streams to be scored, oldest ordinals first.

        A claim that is not answered within ``lease_s`` is handed out again.
        """
        now = time.time()
        unleased = samples.c.reward_until.is_(None) | (samples.c.reward_until < now)
        query = sa.select(samples).where(samples.c.run == run, samples.c.state == State.FINISHED, unleased)
        with self._db.write() as connection:
            lock_run(connection, run)
            query = query.order_by(samples.c.stream, samples.c.ordinal, samples.c.sample).limit(limit)
            rows = [row_of(row) for row in connection.execute(query)]
            for row in rows:
                set_sample(connection, row.key, reward_worker=worker, reward_until=now + lease_s)
        return [ScoreClaim(row.key, row.attempt, row.session or "", row.output) for row in rows]

    def score_sample(self, key: SampleKey, attempt: int, reward: float) -> None:
        """finished -> scored; the same reward again changes nothing.

        Raises:
            RewardError: the reward is not finite (a missing reward is failed, never zero).
            FencedError: the attempt is stale, or the sample has another reward already.
        """
        if not math.isfinite(reward):
            raise RewardError(f"reward of {key} is {reward}: fail the sample with cause reward_invalid instead")
        with self._db.write() as connection:
            lock_run(connection, key.run)
            row = get_sample(connection, key)
            if row.attempt == attempt and row.reward == reward and row.state is not State.FINISHED:
                return
            require(row, attempt, (State.FINISHED,), "score")
            set_sample(connection, key, state=State.SCORED, reward=float(reward), reward_until=None)

    def complete_groups(self, run: str, stream: str = TRAIN) -> list[GroupRows]:
        """Groups whose samples are all scored or terminal, at least one scored, and that have no shard yet."""
        with self._db.read() as connection:
            complete = samples.c.ordinal.in_(_complete(run, stream, stream_row(connection, run, stream)))
            query = sa.select(samples).where(in_stream(run, stream), complete)
            rows = connection.execute(query.order_by(samples.c.ordinal, samples.c.sample)).all()
        members = groupby((row_of(row) for row in rows), key=lambda row: row.key.ordinal)
        return [GroupRows(run, stream, ordinal, tuple(group)) for ordinal, group in members]

    def unwritten(self, run: str, stream: str = TRAIN) -> tuple[int, int]:
        """How many groups are complete and have no shard yet, and the tokens of their scored samples."""
        tokens = sa.func.coalesce(sa.func.sum(samples.c.prompt_tokens + samples.c.completion_tokens), 0)
        query = sa.select(sa.func.count(samples.c.ordinal.distinct()), tokens)
        with self._db.read() as connection:
            complete = samples.c.ordinal.in_(_complete(run, stream, stream_row(connection, run, stream)))
            scored = samples.c.state == State.SCORED
            found = connection.execute(query.where(in_stream(run, stream), scored, complete)).one()
        return int(found[0]), int(found[1])

    def commit_group(
        self, run: str, stream: str, ordinal: int, shard_key: str, sha256: str, tokens_by_session: Mapping[str, int]
    ) -> None:
        """scored -> grouped for the group's samples, whose sessions the shard holds; a repeated call changes nothing.

        Raises:
            IntegrityError: the shard's sessions are not the group's scored sessions, they are fewer than two
                (use :meth:`filter_group`), or the group has another shard already.
            FencedError: a sample of the group is still on its way.
        """
        with self._db.write() as connection:
            lock_run(connection, run)
            here = _group(run, stream, ordinal)
            found = connection.scalar(sa.select(groups.c.sha256).where(here))
            if found is not None:
                _same_shard(f"{run}/{stream}/{ordinal}", found, sha256)
                return
            scored = _scored_members(connection, run, stream, ordinal)
            _check_sessions(f"{run}/{stream}/{ordinal}", scored, tokens_by_session)
            for row in scored:
                set_sample(connection, row.key, state=State.GROUPED, tokens=tokens_by_session[row.session or ""])
            versions = [row.min_version for row in scored if row.min_version is not None]
            values: dict[str, Any] = {"run": run, "stream": stream, "ordinal": ordinal, "shard_key": shard_key}
            values |= {"sha256": sha256, "state": State.GROUPED, "rewards": [row.reward for row in scored]}
            values |= {"start_version": min(versions, default=None), "completed": time.time()}
            connection.execute(groups.insert().values(**values))

    def filter_group(self, run: str, stream: str, ordinal: int, cause: str) -> int:
        """scored or grouped -> filtered(cause) for the group's samples; returns how many changed."""
        with self._db.write() as connection:
            lock_run(connection, run)
            return end_group(connection, run, stream, ordinal, cause)

    def ready_groups(self, run: str, *, min_version: int | None = None) -> int:
        """Training groups that wait for a step; with ``min_version`` only those that are not stale."""
        query = sa.select(sa.func.count()).select_from(groups)
        query = query.where(groups.c.run == run, groups.c.stream == TRAIN, groups.c.state == State.GROUPED)
        if min_version is not None:
            query = query.where(groups.c.start_version >= min_version)
        with self._db.read() as connection:
            return int(connection.scalar(query) or 0)

    def ended_groups(self, run: str, *, refill: bool = False) -> int:
        """Training groups that ended without counting towards any step: each needs another task in its place.

        Groups that were dropped for zero variance counted, unless ``refill`` has them replaced too.
        """
        dropped = sa.and_(samples.c.state == State.FILTERED, samples.c.cause == ZERO_VARIANCE, sa.literal(not refill))
        counted = sa.case((sa.or_(samples.c.state.not_in([State.FILTERED, State.FAILED]), dropped), 1), else_=0)
        with self._db.read() as connection:
            per_task = stream_row(connection, run, TRAIN).samples_per_task
            ended = sa.select(samples.c.ordinal).where(in_stream(run, TRAIN)).group_by(samples.c.ordinal)
            ended = ended.having(sa.func.count() == per_task, sa.func.sum(counted) == 0)
            return int(connection.scalar(sa.select(sa.func.count()).select_from(ended.subquery())) or 0)

    def end_run(self, run: str, cause: str = "run_ended") -> int:
        """End every sample of all streams that no step has claimed as filtered(cause); returns how many.

        Nothing starts any more, and the run's sessions are closed.
        """
        waiting = [state for state in PENDING if state is not State.CLAIMED]
        end = {"state": State.FILTERED, "cause": cause}
        with self._db.write() as connection:
            lock_run(connection, run)
            connection.execute(streams.update().where(streams.c.run == run).values(paused=True))
            close_sessions(connection, sessions.c.run == run)
            grouped = (groups.c.run == run) & (groups.c.state == State.GROUPED)
            connection.execute(groups.update().where(grouped).values(end))
            mine = samples.update().where(samples.c.run == run, samples.c.state.in_(waiting))
            return connection.execute(mine.values(end)).rowcount

    def evaluation(self, run: str, stream: str) -> EvalResult | None:
        """Rewards of an evaluation whose every admitted sample has ended; None: some are still on their way."""
        with self._db.read() as connection:
            return _evaluation(connection, run, stream)[1]

    def finish_evaluation(self, run: str, stream: str) -> EvalResult | None:
        """As :meth:`evaluation`; once it has ended: scored -> filtered(evaluation). A repeated call changes nothing."""
        with self._db.write() as connection:
            lock_run(connection, run)
            rows, result = _evaluation(connection, run, stream)
            for row in rows if result else ():
                if row.state is State.SCORED:
                    set_sample(connection, row.key, state=State.FILTERED, cause=EVALUATION)
            return result


def _evaluation(connection: sa.Connection, run: str, stream: str) -> tuple[list[SampleRow], EvalResult | None]:
    """The samples of an evaluation, and what came of them if all have ended."""
    admission = stream_row(connection, run, stream)
    query = sa.select(samples).where(in_stream(run, stream)).order_by(samples.c.ordinal, samples.c.sample)
    rows = [row_of(row) for row in connection.execute(query)]
    ended = [row for row in rows if row.state in (State.SCORED, *TERMINAL)]
    if len(ended) < max(len(rows), admission.admit_until * admission.samples_per_task):
        return rows, None
    rewards: dict[int, list[float]] = {row.key.ordinal: [] for row in rows}
    for row in rows:
        if row.state is not State.FAILED and row.reward is not None:
            rewards[row.key.ordinal].append(row.reward)
    scored = sum(map(len, rewards.values()))
    return rows, EvalResult(tuple(map(tuple, rewards.values())), failed=len(rows) - scored)


def end_group(
    connection: sa.Connection,
    run: str,
    stream: str,
    ordinal: int,
    cause: str,
    *,
    lineage: int | None = None,
    step: int | None = None,
) -> int:
    """Samples that wait for a step -> filtered(cause), with the step that left them out."""
    values = {"state": State.FILTERED, "cause": cause, "lineage": lineage, "step": step}
    waiting = samples.c.state.in_([State.SCORED, State.GROUPED])
    here = in_stream(run, stream) & (samples.c.ordinal == ordinal)
    changed = connection.execute(samples.update().where(here, waiting).values(**values)).rowcount
    connection.execute(
        groups.update().where(_group(run, stream, ordinal), groups.c.state == State.GROUPED).values(values)
    )
    return changed


def _complete(run: str, stream: str, admission: sa.Row[Any]) -> sa.Select[Any]:
    """Ordinals of the groups whose samples are all scored or terminal, at least one scored."""
    scored = sa.select(samples.c.ordinal).where(in_stream(run, stream), samples.c.state == State.SCORED)
    ready = samples.c.state.in_([State.SCORED, *TERMINAL])
    mine = sa.select(samples.c.ordinal).where(in_stream(run, stream), samples.c.ordinal.in_(scored.distinct()), ready)
    return mine.group_by(samples.c.ordinal).having(sa.func.count() == admission.samples_per_task)


def _group(run: str, stream: str, ordinal: int) -> sa.ColumnElement[bool]:
    return (groups.c.run == run) & (groups.c.stream == stream) & (groups.c.ordinal == ordinal)


def _scored_members(connection: sa.Connection, run: str, stream: str, ordinal: int) -> list[SampleRow]:
    query = sa.select(samples).where(in_stream(run, stream), samples.c.ordinal == ordinal).order_by(samples.c.sample)
    rows = [row_of(row) for row in connection.execute(query)]
    waiting = [row for row in rows if row.state not in (State.SCORED, *TERMINAL)]
    missing = stream_row(connection, run, stream).samples_per_task - len(rows)
    if waiting or missing:
        raise FencedError(
            f"group {run}/{stream}/{ordinal} is not complete: "
            f"{missing} samples not started, {[f'{row.key.sample}: {row.state}' for row in waiting]}"
        )
    return [row for row in rows if row.state is State.SCORED]


def _check_sessions(group: str, scored: list[SampleRow], tokens_by_session: Mapping[str, int]) -> None:
    expected = sorted(row.session or "" for row in scored)
    if expected != sorted(tokens_by_session):
        raise IntegrityError(f"shard of {group} holds sessions {sorted(tokens_by_session)}, the ledger has {expected}")
    if len(expected) < 2:
        raise IntegrityError(f"group {group} has {len(expected)} scored samples: filter it, a shard needs at least two")


def _same_shard(group: str, found: str, sha256: str) -> None:
    if found != sha256:
        raise IntegrityError(f"group {group} has shard {found[:12]} already, refusing {sha256[:12]}")
