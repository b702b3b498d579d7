"""Which sessions' journals nobody needs any more, by the ledger's facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.records import TERMINAL, State
from storage.books.schema import samples, sessions

Superseded = Literal["shard", "trained"]
"""What replaces the journal of a sample: its committed shard, or only the checkpoint that was trained on it."""

_SETTLED: Mapping[Superseded, tuple[State, ...]] = {
    "trained": TERMINAL,
    "shard": (*TERMINAL, State.GROUPED, State.CLAIMED),
}


class Retention(Part):
    """Sessions whose records the journal may forget, and what it held of those it forgot."""

    def superseded(
        self, run: str, *, by: Superseded, ended_before: float, outside_before: float | None, limit: int
    ) -> list[str]:
        """Closed sessions of a run that are not collected, those that ended first before others.

        Sessions of samples that ended ``filtered`` or ``failed``, or that are trained (or have a shard): every attempt
        of them, since an attempt that infrastructure ended may be replayed until its sample has an end. Sessions
        outside the sample queue are in no shard; they are named if they ended before ``outside_before``.
        """
        same = [samples.c[name] == sessions.c[name] for name in ("run", "stream", "ordinal", "sample")]
        settled = samples.c.state.in_(_SETTLED[by]) & (sessions.c.ended < ended_before)
        if outside_before is not None:
            settled |= sessions.c.stream.is_(None) & (sessions.c.ended < outside_before)
        query = (
            sa.select(sessions.c.session)
            .select_from(sessions.outerjoin(samples, sa.and_(*same)))
            .where(sessions.c.run == run, sessions.c.closed, sessions.c.collected.is_(None), settled)
            .order_by(sessions.c.ended, sessions.c.session)
        )
        with self._db.read() as connection:
            return list(connection.execute(query.limit(limit)).scalars())

    def mark_collected(self, sampled: Mapping[str, int]) -> None:
        """The journal removed the records of sessions, which held so many sampled tokens; the first word stands."""
        with self._db.write() as connection:
            for session, tokens in sorted(sampled.items()):
                here = (sessions.c.session == session) & sessions.c.collected.is_(None)
                connection.execute(sessions.update().where(here).values(collected=tokens))
