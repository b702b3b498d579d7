"""Task sources: a task's ordinal decides which line of which file it is, whoever asks and whenever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from storage.errors import ConfigError, NotFoundError
from workflows.spec import RunSpec


class TaskSource:
    """The tasks of one JSONL file, addressed by ordinal.

    Ordinal ``n`` is place ``n % length`` of epoch ``n // length``. With ``shuffle`` each epoch has its own order, a
    function of (seed, epoch) only, so that any process finds the same task after any restart. ``epochs`` None repeats
    the file without end.
    """

    def __init__(self, path: Path, *, seed: int = 0, shuffle: bool = False, epochs: int | None = 1) -> None:
        """Raises :class:`ConfigError` if the file cannot be read, holds no task or has an empty line between tasks."""
        self.path = path
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._starts = _line_starts(path)
        self._order: tuple[int, list[int]] | None = None

    @property
    def length(self) -> int:
        """Tasks per epoch."""
        return len(self._starts)

    @property
    def total(self) -> int | None:
        """Ordinals there are; None if the data never ends."""
        return None if self._epochs is None else self.length * self._epochs

    def line_of(self, ordinal: int) -> int:
        """Line (from 0) that holds the task; :class:`NotFoundError` if the data ends before it."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise NotFoundError(f"{self.path}: task {ordinal} does not exist: the data ends at {self.total}")
        epoch, place = divmod(ordinal, self.length)
        return self._epoch_order(epoch)[place] if self._shuffle else place

    def task(self, ordinal: int) -> dict[str, Any]:
        """The task as written in the file; :class:`ConfigError` if its line is no JSON object."""
        line = self.line_of(ordinal)
        with self.path.open("rb") as file:
            file.seek(self._starts[line])
            return _parse(self.path, line, file.readline())

    def problems(self) -> Iterator[str]:
        """What is wrong with the file, a message per bad line; reads all of it."""
        with self.path.open("rb") as file:
            for line, start in enumerate(self._starts):
                file.seek(start)
                try:
                    _parse(self.path, line, file.readline())
                except ConfigError as error:
                    yield str(error)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.length))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 (reproducible, not secret)
            self._order = (epoch, order)
        return self._order[1]


def source_for(spec: RunSpec, stream: str) -> TaskSource:
    """The source behind ``train`` or ``eval/<version>`` of a run.

    Raises :class:`ConfigError` for an evaluation of a run without held-out tasks.
    """
    if stream == "train":
        data = spec.data
        return TaskSource(Path(data.path), seed=spec.seed, shuffle=data.shuffle, epochs=data.epochs)
    if spec.data.held_out is None:
        raise ConfigError(f"run {spec.run}: stream {stream!r} needs data.held_out in the run file")
    return TaskSource(Path(spec.data.held_out))


def _line_starts(path: Path) -> list[int]:
    """Byte offset of each line; empty lines may only stand at the end."""
    starts: list[int] = []
    empty: int | None = None
    offset = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    empty = empty or number
                elif empty is not None:
                    raise ConfigError(f"{path}, line {empty}: empty line between tasks: remove it")
                else:
                    starts.append(offset)
                offset += len(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the tasks: {error.strerror or error}") from None
    if not starts:
        raise ConfigError(f"{path}: holds no task: write one JSON object a line")
    return starts


def _parse(path: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        task = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line + 1}: not JSON: {error}") from None
    if not isinstance(task, dict):
        raise ConfigError(f"{path}, line {line + 1}: a task is a JSON object, not {type(task).__name__}")
    return task
