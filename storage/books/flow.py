"""How groups come in, and what of them waits: the facts of triggers, of hysteresis and of batch selection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.records import END_OF_DATA, TRAIN, Flow, State, WaitingGroup
from storage.books.runs import in_stream, stream_row
from storage.books.schema import groups, samples

LATELY = 12
"""Groups by which the rate is told: few, so that it follows lengths that drift."""
_UNDER_WAY = (State.QUEUED, State.RUNNING, State.FINISHED, State.SCORED)


class Flows(Part):
    """Reads the training stream as a scheduler does."""

    def flow(self, run: str, *, min_version: int) -> Flow:
        """How groups come in; those started with weights older than ``min_version`` are not ready."""
        mine = (groups.c.run == run) & (groups.c.stream == TRAIN)
        ready = sa.select(sa.func.count()).where(
            mine, groups.c.state == State.GROUPED, groups.c.start_version >= min_version
        )
        lately = sa.select(groups.c.completed).where(mine, groups.c.completed.is_not(None))
        with self._db.read() as connection:
            admission = stream_row(connection, run, TRAIN)
            in_flight = len(_under_way(connection, run))
            begun = -(-admission.produced // admission.samples_per_task)
            times = list(connection.execute(lately.order_by(groups.c.completed.desc()).limit(LATELY)).scalars())
            return Flow(
                ready=connection.scalar(ready) or 0,
                in_flight=in_flight,
                supply=max(0, admission.admit_until - begun) + in_flight,
                rate=_rate(times, time.time()),
            )

    def waiting_groups(self, run: str) -> list[WaitingGroup]:
        """Complete groups that no step has claimed, by ordinal."""
        query = sa.select(groups).where(groups.c.run == run, groups.c.stream == TRAIN, groups.c.state == State.GROUPED)
        with self._db.read() as connection:
            return waiting_groups(connection, run, connection.execute(query.order_by(groups.c.ordinal)).all())

    def data_end(self, run: str) -> int | None:
        """First task of the training stream that its source did not have; None: none was missed."""
        missed = sa.select(sa.func.min(samples.c.ordinal)).where(
            in_stream(run, TRAIN), samples.c.state == State.FAILED, samples.c.cause == END_OF_DATA
        )
        with self._db.read() as connection:
            found = connection.scalar(missed)
        return None if found is None else int(found)

    def ordinals_under_way(self, run: str) -> list[int]:
        """Tasks of the training stream that are begun and not complete."""
        with self._db.read() as connection:
            return _under_way(connection, run)


def waiting_groups(connection: sa.Connection, run: str, rows: Sequence[sa.Row[Any]]) -> list[WaitingGroup]:
    """The public records of rows of ``groups``, with the tokens of their samples."""
    ordinals = [row.ordinal for row in rows]
    total = sa.select(samples.c.ordinal, sa.func.sum(samples.c.tokens).label("tokens"))
    total = total.where(in_stream(run, TRAIN), samples.c.ordinal.in_(ordinals)).group_by(samples.c.ordinal)
    tokens = {row.ordinal: int(row.tokens or 0) for row in connection.execute(total)}
    return [
        WaitingGroup(row.ordinal, row.start_version or 0, tuple(row.rewards), row.completed or 0.0, tokens[row.ordinal])
        for row in rows
    ]


def _under_way(connection: sa.Connection, run: str) -> list[int]:
    query = sa.select(samples.c.ordinal).distinct().where(in_stream(run, TRAIN), samples.c.state.in_(_UNDER_WAY))
    return sorted(connection.execute(query).scalars())


def _rate(newest_first: Sequence[float], now: float) -> float:
    """Completions per second; a pause that is longer than usual counts."""
    if len(newest_first) < 2:
        return 0.0
    last, first = newest_first[0], newest_first[-1]
    usual = (last - first) / (len(newest_first) - 1)
    span = max(last, now - usual) - first
    return (len(newest_first) - 1) / span if span > 0 else 0.0
