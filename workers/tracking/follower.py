"""Reads what the ledger says of each run and tells its trackers. A tracker that fails costs figures, never a run.

``<state>/tracking/<run>/<tracker>/position.json`` says up to where a tracker was told; the lock of ``tracking/`` makes
one control worker of several the teller.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from pydantic import BaseModel, ConfigDict

from storage.books.records import EvalResult, RunInfo, StepRecord
from storage.ledger import evaluated_version
from storage.metrics import passes
from workers.cluster import write_whole
from workers.tracking.trackers import Figures, Tracker, TrackerKind, trackers_of
from workflows.spec import RunSpec

log = logging.getLogger(__name__)

POLL_S = 2.0


class Books(Protocol):
    """What is read of the ledger."""

    def runs(self) -> list[RunInfo]: ...

    def steps(self, run: str, *, recorded_after: float = ...) -> list[StepRecord]: ...

    def streams(self, run: str) -> list[str]: ...

    def evaluation(self, run: str, stream: str) -> EvalResult | None: ...


class Position(BaseModel):
    """Up to where a tracker was told of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recorded: float = 0.0
    """When the last step it was told of was recorded, unix seconds."""
    evaluations: frozenset[str] = frozenset()
    """Streams of the evaluations it was told of."""


@dataclass(frozen=True)
class Entry:
    """Figures of one step, and the position behind them."""

    figures: Figures
    step: int
    at: float
    behind: Position


class Follower:
    """Tells the trackers of all runs, again and again, until it is stopped."""

    def __init__(self, books: Books, root: Path) -> None:
        self._books = books
        self._root = root
        self._lock: IO[bytes] | None = None
        self._told: dict[str, list[_Told]] = {}
        self._ended: dict[str, float] = {}
        """Runs that have ended and are told, by when they ended."""

    async def follow(self, stop: asyncio.Event) -> None:
        """Look every :data:`POLL_S` seconds, and a last time once ``stop`` is set."""
        while not stop.is_set():
            await asyncio.to_thread(self.look)
            try:
                await asyncio.wait_for(stop.wait(), POLL_S)
            except TimeoutError:
                continue
        await asyncio.to_thread(self.look)
        await asyncio.to_thread(self.close)

    def look(self) -> None:
        """Tell every tracker what it does not know yet."""
        if not self._is_the_teller():
            return
        try:
            for info in self._books.runs():
                if info.stopped is None or self._ended.get(info.run) != info.stopped:
                    self._tell(info)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with figures, a control worker goes on
            log.warning("trackers are told later: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Write out what is pending, and let another process be the teller."""
        for run in list(self._told):
            self._close(run)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _is_the_teller(self) -> bool:
        if self._lock is None:
            self._root.mkdir(parents=True, exist_ok=True)
            lock = (self._root / "lock").open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def _tell(self, info: RunInfo) -> None:
        if info.run not in self._told:
            spec = RunSpec.model_validate(info.spec)
            self._told[info.run] = [_Told(spec, kind, self._root / info.run / kind.name) for kind in trackers_of(spec)]
        complete = [told.tell(self._books) for told in self._told[info.run]]
        if info.stopped is not None and all(complete):
            self._close(info.run)
            self._ended[info.run] = info.stopped

    def _close(self, run: str) -> None:
        for told in self._told.pop(run):
            told.close()


class _Told:
    """One tracker of one run."""

    def __init__(self, spec: RunSpec, kind: TrackerKind, folder: Path) -> None:
        self._run = spec.run
        self._evaluation = spec.evaluation
        self._kind = kind
        self._folder = folder
        self._tracker: Tracker | None = None
        self._failing = False

    def tell(self, books: Books) -> bool:
        """Tell what is new; false if the tracker failed: it is told again next time."""
        for entry in self._news(books):
            try:
                if self._tracker is None:
                    self._tracker = self._kind.connect(self._folder)
                self._tracker.log(entry.figures, step=entry.step, at=entry.at)
            except Exception as error:  # noqa: BLE001 - a tracker is somebody else's code, on somebody else's network
                if not self._failing:
                    log.warning("tracker %s of run %s is told later: %s", self._kind.name, self._run, error)
                self._failing = True
                self.close()
                return False
            write_whole(self._position, entry.behind.model_dump_json(), mode=0o644)
        self._failing = False
        return True

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tracker %s of run %s did not close: %s", self._kind.name, self._run, error)

    @property
    def _position(self) -> Path:
        return self._folder / "position.json"

    def _news(self, books: Books) -> Iterator[Entry]:
        known = self._position.is_file()
        position = Position.model_validate_json(self._position.read_text()) if known else Position()
        steps = books.steps(self._run, recorded_after=position.recorded)
        for step in sorted(steps, key=lambda step: step.recorded):
            position = position.model_copy(update={"recorded": step.recorded})
            yield Entry(_of_step(step), step.step, step.recorded, position)
        for stream in sorted({*books.streams(self._run)} - position.evaluations):
            version = evaluated_version(stream)
            result = None if version is None else books.evaluation(self._run, stream)
            if version is not None and result is not None:
                position = position.model_copy(update={"evaluations": position.evaluations | {stream}})
                yield Entry(self._of_evaluation(result), version, time.time(), position)

    def _of_evaluation(self, result: EvalResult) -> Figures:
        figures = {"eval/samples": float(result.n), "eval/failed": float(result.failed)}
        if result.mean is not None:
            figures["eval/reward_mean"] = result.mean
        chances = passes(self._evaluation.pass_at, result.rewards, self._evaluation.pass_reward)
        return figures | {f"eval/pass_at_{k}": chance for k, chance in chances.items()}


def _of_step(step: StepRecord) -> Figures:
    return {f"train/{name}": float(value) for name, value in step.metrics.items() if isinstance(value, int | float)}
