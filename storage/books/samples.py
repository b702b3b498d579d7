"""Samples from their start to the end of their attempts: claim, finish, fail, release."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part
from storage.books.records import ReleasedSample, SampleClaim, SampleKey, SampleRow, State
from storage.books.runs import in_stream, lock_run, stream_row
from storage.books.schema import attempts, routes, samples, sessions, streams
from storage.errors import ConfigError, FencedError, NotFoundError
from workflows.scheduling.admission import AdmissionFacts, may_start

FAILABLE = (State.RUNNING, State.FINISHED, State.SCORED)
_KEY = ("run", "stream", "ordinal", "sample")


def _matches(table: sa.Table, *columns: str) -> sa.ColumnElement[bool]:
    """Condition: the columns have the values bound as ``at_<column>``."""
    return sa.and_(*(table.c[name] == sa.bindparam(f"at_{name}") for name in columns))


# Built once: building a statement costs more than running it.
_GET = sa.select(samples).where(_matches(samples, *_KEY))
_SET = samples.update().where(_matches(samples, *_KEY))
_RUNNING = sa.select(sa.func.count()).where(_matches(samples, "run", "stream"), samples.c.state == State.RUNNING)
_QUEUED = (
    sa.select(samples.c.ordinal, samples.c.sample, samples.c.attempt)
    .where(_matches(samples, "run", "stream"), samples.c.state == State.QUEUED)
    .order_by(samples.c.ordinal, samples.c.sample)
    .limit(sa.bindparam("limit"))
)
_BEHIND = sa.case((routes.c.version < sa.bindparam("version"), 1), else_=0)
_ROUTES = sa.select(sa.func.count(), sa.func.sum(_BEHIND)).where(
    _matches(routes, "run"), routes.c.state.in_(("open", "held"))
)
_SESSION = sa.select(sessions.c.session).where(_matches(sessions, *_KEY, "attempt")).limit(1)
_CLOSE = (
    sessions.update()
    .where(_matches(sessions, *_KEY, "attempt"), sessions.c.closed.is_(False))
    .values(closed=True, ended=sa.bindparam("now"))
)
_CAUSE = sa.select(attempts.c.cause).where(_matches(attempts, *_KEY, "attempt"))


class Samples(Part):
    """The first half of a sample's life: queued, running, finished."""

    def claim_samples(self, run: str, stream: str, worker: str, limit: int) -> list[SampleClaim]:
        """Start up to ``limit`` samples: retries first, then new ones in ordinal order, a group before the next.

        Never lets more than ``target_in_flight`` run, nor more than the engines with a route can take; nothing while
        paused or past ``admit_until``.
        """
        with self._db.write() as connection:
            lock_run(connection, run)
            admission = stream_row(connection, run, stream)
            if admission.paused:
                return []
            queued = connection.execute(_QUEUED, {"at_run": run, "at_stream": stream, "limit": limit}).all()
            again, new = may_start(_admission_facts(connection, admission), len(queued))
            claims = _start_again(connection, admission, worker, queued[:again])
            claims += _start_new(connection, admission, worker, min(new, limit - len(claims)))
        return claims

    def release_worker(self, run: str, stream: str, worker: str, *, max_attempts: int) -> list[ReleasedSample]:
        """End the running attempts of a lost worker as infrastructure failures; its samples are queued again.

        A sample whose ``max_attempts`` are used up ends ``failed(infra)``. Their sessions are closed.
        """
        with self._db.write() as connection:
            lock_run(connection, run)
            query = sa.select(samples).where(
                in_stream(run, stream), samples.c.state == State.RUNNING, samples.c.worker == worker
            )
            rows = [row_of(row) for row in connection.execute(query.order_by(samples.c.ordinal, samples.c.sample))]
            return [
                ReleasedSample(
                    row.key,
                    row.attempt,
                    row.session or session_of(connection, row.key, row.attempt),
                    _end_attempt(connection, row, "infra", f"worker {worker} was lost", True, max_attempts),
                )
                for row in rows
            ]

    def finish_sample(
        self,
        key: SampleKey,
        attempt: int,
        *,
        session: str,
        prompt_tokens: int,
        completion_tokens: int,
        turns: int,
        min_version: int | None,
        max_version: int | None,
        output: Any,
    ) -> None:
        """running -> finished, and the session is closed; a repeated call changes nothing.

        ``min_version`` and ``max_version`` are over the tokens with a known weight version, None if there is none.

        Raises:
            FencedError: the attempt is not the one that runs.
        """
        with self._db.write() as connection:
            lock_run(connection, key.run)
            row = get_sample(connection, key)
            if (row.attempt, row.session) == (attempt, session) and row.turns is not None:
                return
            require(row, attempt, (State.RUNNING,), "finish")
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "turns": turns}
            versions = {"min_version": min_version, "max_version": max_version}
            set_sample(connection, key, state=State.FINISHED, session=session, output=output, **counts, **versions)
            _close_sessions(connection, key, attempt)

    def fail_sample(
        self, key: SampleKey, attempt: int, cause: str, detail: str, *, retry: bool, max_attempts: int
    ) -> int | None:
        """End an attempt that has no result. Returns the number of the next attempt, or None: the sample failed.

        With ``retry`` the sample is queued again until ``max_attempts`` are used
        up. The attempt's session is closed. A repeated call changes nothing.

        Raises:
            FencedError: the attempt is not the sample's last, or the sample is past being failed.
        """
        with self._db.write() as connection:
            lock_run(connection, key.run)
            row = get_sample(connection, key)
            if row.attempt >= attempt and _ended_by(connection, key, attempt) == cause:
                return attempt + 1 if row.attempt > attempt else None
            require(row, attempt, FAILABLE, "fail")
            return _end_attempt(connection, row, cause, detail, retry, max_attempts)

    def sample(self, key: SampleKey) -> SampleRow:
        """Raises NotFoundError if the sample was never started."""
        with self._db.read() as connection:
            return get_sample(connection, key)

    def samples(self, run: str, stream: str, *, state: State | None = None) -> list[SampleRow]:
        """Samples of a stream by (ordinal, sample)."""
        query = sa.select(samples).where(in_stream(run, stream))
        if state is not None:
            query = query.where(samples.c.state == state)
        with self._db.read() as connection:
            rows = connection.execute(query.order_by(samples.c.ordinal, samples.c.sample)).all()
        return [row_of(row) for row in rows]


def row_of(row: sa.Row[Any]) -> SampleRow:
    """The public record of a row of ``samples``."""
    values = dict(row._mapping)
    values.pop("reward_worker")
    values.pop("reward_until")
    key = SampleKey(*(values.pop(name) for name in _KEY))
    return SampleRow(key=key, state=State(values.pop("state")), **values)


def get_sample(connection: sa.Connection, key: SampleKey) -> SampleRow:
    """Raises NotFoundError if the sample was never started."""
    row = connection.execute(_GET, _at(key)).one_or_none()
    if row is None:
        raise NotFoundError(f"sample {key} was never started")
    return row_of(row)


def set_sample(connection: sa.Connection, key: SampleKey, **values: Any) -> None:
    """Write columns of one sample."""
    connection.execute(_SET, {**_at(key), **values})


def require(row: SampleRow, attempt: int, states: tuple[State, ...], verb: str) -> None:
    """Raise FencedError unless the row is at ``attempt`` and in one of ``states``."""
    if row.attempt != attempt:
        raise FencedError(f"cannot {verb} attempt {attempt} of {row.key}: it is at attempt {row.attempt} now")
    if row.state not in states:
        raise FencedError(f"cannot {verb} {row.key} (attempt {attempt}): it is {row.state}{_cause(row)}")


def session_of(connection: sa.Connection, key: SampleKey, attempt: int) -> str | None:
    """Newest session made for an attempt, if any."""
    return connection.scalar(_SESSION, _at(key, attempt))


def _cause(row: SampleRow) -> str:
    return f" ({row.cause})" if row.cause else ""


def _at(key: SampleKey, attempt: int | None = None) -> dict[str, Any]:
    values = {f"at_{name}": getattr(key, name) for name in _KEY}
    return values if attempt is None else {**values, "at_attempt": attempt}


def _close_sessions(connection: sa.Connection, key: SampleKey, attempt: int) -> None:
    connection.execute(_CLOSE, {**_at(key, attempt), "now": time.time()})


def _admission_facts(connection: sa.Connection, admission: sa.Row[Any]) -> AdmissionFacts:
    run, stream = admission.run, admission.stream
    engines, behind = _routes(connection, run, admission.fresh_version or 0)
    return AdmissionFacts(
        produced=admission.produced,
        running=connection.scalar(_RUNNING, {"at_run": run, "at_stream": stream}) or 0,
        admit_until=admission.admit_until,
        samples_per_task=admission.samples_per_task,
        target_in_flight=admission.target_in_flight,
        capacity=None if admission.per_route is None else engines * admission.per_route,
        fresh_from=admission.fresh_from,
        engines=engines,
        behind=behind,
    )


def _routes(connection: sa.Connection, run: str, version: int) -> tuple[int, int]:
    """Engines of the run, and how many serve older weights; a route that is held for new ones will be open again."""
    engines, behind = connection.execute(_ROUTES, {"at_run": run, "version": version}).one()
    return engines or 0, int(behind or 0)


def _start_again(
    connection: sa.Connection, admission: sa.Row[Any], worker: str, rows: Sequence[sa.Row[*tuple[Any, ...]]]
) -> list[SampleClaim]:
    run, stream = admission.run, admission.stream
    claims = [SampleClaim(SampleKey(run, stream, row.ordinal, row.sample), row.attempt) for row in rows]
    for claim in claims:
        set_sample(connection, claim.key, state=State.RUNNING, worker=worker, session=None)
    return claims


def _start_new(connection: sa.Connection, admission: sa.Row[Any], worker: str, count: int) -> list[SampleClaim]:
    if count <= 0:
        return []
    run, stream, per_task = admission.run, admission.stream, admission.samples_per_task
    # Samples start in order, so their count is the position of the next one.
    first = admission.produced
    last = first + count
    claims = [SampleClaim(SampleKey(run, stream, n // per_task, n % per_task), 1) for n in range(first, last)]
    start = {"run": run, "stream": stream, "attempt": 1, "state": State.RUNNING, "worker": worker}
    rows = [{**start, "ordinal": claim.key.ordinal, "sample": claim.key.sample} for claim in claims]
    connection.execute(samples.insert(), rows)
    here = (streams.c.run == run) & (streams.c.stream == stream)
    connection.execute(streams.update().where(here).values(produced=last))
    return claims


def _ended_by(connection: sa.Connection, key: SampleKey, attempt: int) -> str | None:
    return connection.scalar(_CAUSE, _at(key, attempt))


def _end_attempt(
    connection: sa.Connection, row: SampleRow, cause: str, detail: str, retry: bool, max_attempts: int
) -> int | None:
    if max_attempts < 1:
        raise ConfigError(f"max_attempts is {max_attempts}: must be at least 1")
    key = row.key
    session = row.session or session_of(connection, key, row.attempt)
    ended = {"run": key.run, "stream": key.stream, "ordinal": key.ordinal, "sample": key.sample}
    ended |= {"attempt": row.attempt, "cause": cause, "detail": detail, "worker": row.worker, "session": session}
    connection.execute(attempts.insert().values(**ended, ended=time.time()))
    _close_sessions(connection, key, row.attempt)
    if retry and row.attempt < max_attempts:
        fresh: dict[str, Any] = dict.fromkeys(
            ("worker", "session", "prompt_tokens", "completion_tokens", "turns", "min_version", "max_version", "output")
        )
        fresh |= dict.fromkeys(("reward", "reward_worker", "reward_until"))
        set_sample(connection, key, state=State.QUEUED, attempt=row.attempt + 1, **fresh)
        return row.attempt + 1
    set_sample(connection, key, state=State.FAILED, cause=cause, detail=detail, session=session)
    return None
