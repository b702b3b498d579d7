"""Runs, what may start in their streams, and what is recorded about them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from storage.books.database import Part, insert_new, upsert
from storage.books.records import Admission, AuditEntry, Interval, RunInfo, StepRecord
from storage.books.schema import audit, intervals, runs, samples, steps, streams
from storage.errors import ConfigError, FencedError, NotFoundError

INTERVAL_KINDS = ("generate", "train", "reference", "critic")
# Statements of hot paths are built once: building one costs more than running it.
_LOCK = sa.select(runs.c.lineage).where(runs.c.run == sa.bindparam("run")).with_for_update()
_STREAM = sa.select(streams).where(streams.c.run == sa.bindparam("run"), streams.c.stream == sa.bindparam("stream"))


class Runs(Part):
    """Rows by run: spec, state, admission, metrics, busy intervals, human commands."""

    def create_run(self, run: str, spec: Mapping[str, Any], spec_digest: str) -> None:
        """Enter a run; the same run with the same digest is entered once, and keeps the spec it was given last.

        Raises:
            ConfigError: the run exists with another spec.
        """
        with self._db.write() as connection:
            row = {"run": run, "spec": dict(spec), "spec_digest": spec_digest, "created": time.time()}
            insert_new(connection, runs, ("run",), {**row, "state": "created", "stopped": None, "lineage": 0})
            found = connection.scalar(sa.select(runs.c.spec_digest).where(runs.c.run == run)) or ""
            if found != spec_digest:
                raise ConfigError(
                    f"run {run!r} exists with another run file (digest {found[:12]}, not {spec_digest[:12]}): "
                    "give the changed run another name"
                )
            connection.execute(runs.update().where(runs.c.run == run).values(spec=dict(spec)))

    def run_info(self, run: str) -> RunInfo:
        """Raises NotFoundError if there is no such run."""
        with self._db.read() as connection:
            row = connection.execute(sa.select(runs).where(runs.c.run == run)).one_or_none()
        if row is None:
            raise _no_run(run)
        return RunInfo(**row._mapping)

    def runs(self) -> list[RunInfo]:
        """All runs, oldest first."""
        with self._db.read() as connection:
            rows = connection.execute(sa.select(runs).order_by(runs.c.created, runs.c.run)).all()
        return [RunInfo(**row._mapping) for row in rows]

    def set_run_state(self, run: str, state: str, *, stopped: bool = False) -> None:
        """Say where the run is; ``stopped`` notes the time it ended (a run that goes on again loses it)."""
        with self._db.write() as connection:
            lock_run(connection, run)
            values = {"state": state, "stopped": time.time() if stopped else None}
            connection.execute(runs.update().where(runs.c.run == run).values(**values))

    def set_admission(
        self,
        run: str,
        stream: str,
        *,
        admit_until: int,
        target_in_flight: int,
        samples_per_task: int,
        paused: bool = False,
        per_route: int | None = None,
        fresh_from: int | None = None,
        fresh_version: int | None = None,
    ) -> None:
        """Let the ordinals ``[0, admit_until)`` start, at most ``target_in_flight`` samples at a time.

        ``per_route``: sequences that the engine of each open route decodes together, which bounds what runs too.
        ``fresh_from``: ordinals from which on tasks wait until most engines serve weight version ``fresh_version``.

        Raises:
            ConfigError: ``samples_per_task`` differs from what the stream started with.
        """
        limits = {"admit_until": admit_until, "target_in_flight": target_in_flight, "per_route": per_route}
        values: dict[str, Any] = {
            **limits,
            "paused": paused,
            "fresh_from": fresh_from,
            "fresh_version": fresh_version,
        }
        with self._db.write() as connection:
            lock_run(connection, run)
            here = (streams.c.run == run) & (streams.c.stream == stream)
            found = connection.scalar(sa.select(streams.c.samples_per_task).where(here))
            if found is None:
                row = {"run": run, "stream": stream, "samples_per_task": samples_per_task, "produced": 0}
                connection.execute(streams.insert().values(**row, **values))
            elif found != samples_per_task:
                raise ConfigError(
                    f"{run}/{stream} has {found} samples per task, which cannot become {samples_per_task}"
                )
            else:
                connection.execute(streams.update().where(here).values(**values))

    def change_admission(
        self,
        run: str,
        stream: str,
        *,
        admit_until: int | None = None,
        target_in_flight: int | None = None,
        paused: bool | None = None,
    ) -> None:
        """Change some limits and leave the others, so that those who change different ones do not undo each other.

        Raises:
            NotFoundError: the stream was never admitted.
        """
        given = {"admit_until": admit_until, "target_in_flight": target_in_flight, "paused": paused}
        values = {name: value for name, value in given.items() if value is not None}
        with self._db.write() as connection:
            lock_run(connection, run)
            stream_row(connection, run, stream)
            here = (streams.c.run == run) & (streams.c.stream == stream)
            connection.execute(streams.update().where(here).values(**values))

    def admission(self, run: str, stream: str) -> Admission:
        """Raises NotFoundError where ``set_admission`` was never called."""
        with self._db.read() as connection:
            row = stream_row(connection, run, stream)
        return Admission(**row._mapping)

    def streams(self, run: str) -> list[str]:
        """Names of the run's streams: ``train``, and ``eval/<version>`` for each evaluation."""
        query = sa.select(streams.c.stream).where(streams.c.run == run).order_by(streams.c.stream)
        with self._db.read() as connection:
            return list(connection.execute(query).scalars())

    def record_step(self, run: str, lineage: int, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of an update; a second call replaces them."""
        row = {"run": run, "lineage": lineage, "step": step, "metrics": dict(metrics), "recorded": time.time()}
        with self._db.write() as connection:
            lock_run(connection, run)
            upsert(connection, steps, ("run", "lineage", "step"), row)

    def steps(self, run: str, *, recorded_after: float = 0.0) -> list[StepRecord]:
        """Metrics of all updates, or of those recorded after a time (unix seconds), by (step, lineage)."""
        chosen = (steps.c.run == run) & (steps.c.recorded > recorded_after)
        query = sa.select(steps).where(chosen).order_by(steps.c.step, steps.c.lineage)
        with self._db.read() as connection:
            return [StepRecord(**row._mapping) for row in connection.execute(query)]

    def record_interval(self, run: str, node: str, kind: str, start: float, end: float) -> None:
        """Note that ``node`` was busy with ``kind``; the same start again moves the end (an interval that goes on)."""
        if kind not in INTERVAL_KINDS:
            raise ConfigError(f"interval kind {kind!r} of node {node!r}: must be one of {', '.join(INTERVAL_KINDS)}")
        row = {"run": run, "node": node, "kind": kind, "start": start, "end": end}
        with self._db.write() as connection:
            upsert(connection, intervals, ("run", "node", "kind", "start"), row)

    def intervals(self, run: str) -> list[Interval]:
        """Busy intervals by start."""
        columns = (intervals.c.node, intervals.c.kind, intervals.c.start, intervals.c.end)
        query = sa.select(*columns).where(intervals.c.run == run).order_by(intervals.c.start, intervals.c.node)
        with self._db.read() as connection:
            return [Interval(**row._mapping) for row in connection.execute(query)]

    def audit(self, actor: str, what: str, why: str, data: Mapping[str, Any] | None = None) -> None:
        """Note a human command."""
        row = {"at": time.time(), "actor": actor, "what": what, "why": why, "data": dict(data or {})}
        with self._db.write() as connection:
            connection.execute(audit.insert().values(**row))

    def audits(self) -> list[AuditEntry]:
        """Human commands, oldest first."""
        columns = (audit.c.at, audit.c.actor, audit.c.what, audit.c.why, audit.c.data)
        with self._db.read() as connection:
            rows = connection.execute(sa.select(*columns).order_by(audit.c.id)).all()
        return [AuditEntry(**row._mapping) for row in rows]


def lock_run(connection: sa.Connection, run: str, *, lineage: int | None = None) -> int:
    """Exclude other writers of the run for this transaction; returns its newest lineage.

    Raises:
        NotFoundError: no such run.
        FencedError: ``lineage`` is older than the run's.
    """
    current = connection.scalar(_LOCK, {"run": run})
    if current is None:
        raise _no_run(run)
    if lineage is not None and lineage < current:
        raise FencedError(f"run {run!r} was rewound to lineage {current}: lineage {lineage} may not change it any more")
    return int(current)


def stream_row(connection: sa.Connection, run: str, stream: str) -> sa.Row[Any]:
    """The stream's admission; NotFoundError where it was never set."""
    row = connection.execute(_STREAM, {"run": run, "stream": stream}).one_or_none()
    if row is None:
        raise NotFoundError(f"run {run!r} has no stream {stream!r}: set its admission first")
    return row


def in_stream(run: str, stream: str) -> sa.ColumnElement[bool]:
    """Condition: the samples of one stream."""
    return (samples.c.run == run) & (samples.c.stream == stream)


def _no_run(run: str) -> NotFoundError:
    return NotFoundError(f"no run {run!r} in the ledger: create it first")
