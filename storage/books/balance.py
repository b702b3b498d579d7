"""The books of a run: does every sample that was started have exactly one place, and why did some have no result?"""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.records import TERMINAL, Books, Failure, SampleKey, State
from storage.books.schema import attempts, batches, checkpoints, groups, samples, streams


class Balance(Part):
    """Reads the ledger as an auditor does: the same facts by two ways, differences named."""

    def books(self, run: str, stream: str | None = None) -> Books:
        """Where the samples of a run (or of one stream) are."""
        columns = (samples.c.state, samples.c.cause, sa.func.count().label("n"))
        counts = sa.select(*columns).where(samples.c.run == run).group_by(samples.c.state, samples.c.cause)
        produced = sa.select(sa.func.sum(streams.c.produced)).where(streams.c.run == run)
        if stream is not None:
            counts = counts.where(samples.c.stream == stream)
            produced = produced.where(streams.c.stream == stream)
        by_state: dict[State, Counter[str]] = {state: Counter() for state in State}
        with self._db.read() as connection:
            for row in connection.execute(counts):
                by_state[State(row.state)][row.cause or ""] += row.n
            started = int(connection.scalar(produced) or 0)
            problems = _problems(connection, run)
        found = sum(causes.total() for causes in by_state.values())
        if found != started:
            problems.append(f"{started} samples were started, {found} are in the ledger")
        return Books(
            produced=started,
            trained=by_state[State.TRAINED].total(),
            filtered=dict(by_state[State.FILTERED]),
            failed=dict(by_state[State.FAILED]),
            pending={s.value: by_state[s].total() for s in State if s not in TERMINAL and by_state[s]},
            problems=tuple(problems),
        )

    def failures(self, run: str, stream: str | None = None) -> list[Failure]:
        """Why attempts of a run (or of one stream) ended without a result, the most frequent cause first."""
        mine = [attempts.c.run == run, *([] if stream is None else [attempts.c.stream == stream])]
        newest = (attempts.c.ended.desc(), attempts.c.ordinal.desc(), attempts.c.sample.desc())
        ranked = sa.select(
            attempts,
            sa.func.count().over(partition_by=attempts.c.cause).label("n"),
            sa.func.row_number().over(partition_by=attempts.c.cause, order_by=newest).label("rank"),
        )
        last = ranked.where(*mine).subquery()
        query = sa.select(last).where(last.c.rank == 1).order_by(last.c.n.desc(), last.c.cause)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return [
            Failure(
                cause=row.cause,
                attempts=row.n,
                key=SampleKey(row.run, row.stream, row.ordinal, row.sample),
                attempt=row.attempt,
                session=row.session,
                detail=row.detail,
                ended=row.ended,
            )
            for row in rows
        ]


def _problems(connection: sa.Connection, run: str) -> list[str]:
    mine = samples.c.run == run
    checks = {
        "ended without a cause": sa.select(sa.func.count()).where(
            mine, samples.c.state.in_([State.FILTERED, State.FAILED]), samples.c.cause.is_(None)
        ),
        "trained without a checkpoint that contains their step": sa.select(sa.func.count()).where(
            mine, samples.c.state == State.TRAINED, ~_checkpointed()
        ),
        "claimed by no open batch": sa.select(sa.func.count()).where(
            mine, samples.c.state == State.CLAIMED, ~_in_batch(State.CLAIMED)
        ),
        "trained by no trained batch": sa.select(sa.func.count()).where(
            mine, samples.c.state == State.TRAINED, ~_in_batch(State.TRAINED)
        ),
        "in another state than their shard": sa.select(sa.func.count()).where(
            mine, samples.c.state.in_([State.GROUPED, State.CLAIMED, State.TRAINED]), ~_like_group()
        ),
    }
    found = {problem: connection.scalar(query) or 0 for problem, query in checks.items()}
    return [f"{n} samples {problem}" for problem, n in found.items() if n]


def _checkpointed() -> sa.ColumnElement[bool]:
    same_lineage = (checkpoints.c.run == samples.c.run) & (checkpoints.c.lineage == samples.c.lineage)
    return sa.exists().where(same_lineage, checkpoints.c.step >= samples.c.step)


def _in_batch(state: State) -> sa.ColumnElement[bool]:
    same = (batches.c.run == samples.c.run) & (batches.c.lineage == samples.c.lineage)
    return sa.exists().where(same, batches.c.step == samples.c.step, batches.c.state == state)


def _like_group() -> sa.ColumnElement[bool]:
    same = (groups.c.run == samples.c.run) & (groups.c.stream == samples.c.stream)
    return sa.exists().where(same, groups.c.ordinal == samples.c.ordinal, groups.c.state == samples.c.state)
