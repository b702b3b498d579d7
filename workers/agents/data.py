"""Task sources: a task's ordinal decides which task it is, whoever asks and whenever."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from storage.errors import ConfigError, NotFoundError
from workers.agents.targets import load_target
from workflows.spec import RunSpec

KEPT = 4096
"""Tasks of an iterable that are kept for another attempt or a reward; older ones are found by starting anew."""


class Tasks(Protocol):
    """Where tasks come from."""

    def task(self, ordinal: int) -> dict[str, Any]:
        """:class:`NotFoundError` if the data ends before it, :class:`ConfigError` if it is no JSON object."""
        ...


class OrderedTasks(ABC):
    """A known number of tasks, in epochs.

    Ordinal ``n`` is place ``n % length`` of epoch ``n // length``. With ``shuffle`` each epoch has its own order, a
    function of (seed, epoch) only, so that any process finds the same task after any restart. ``epochs`` None repeats
    them without end. ``name`` is what messages call the data.
    """

    def __init__(self, name: str, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self._name = name
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._order: tuple[int, list[int]] | None = None

    @property
    @abstractmethod
    def length(self) -> int:
        """Tasks per epoch."""

    @abstractmethod
    def at(self, place: int) -> dict[str, Any]:
        """The task in a place of the unshuffled data."""

    @property
    def total(self) -> int | None:
        """Ordinals there are; None if the data never ends."""
        return None if self._epochs is None else self.length * self._epochs

    def line_of(self, ordinal: int) -> int:
        """Place (from 0) of the task in the data; :class:`NotFoundError` if the data ends before it."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise NotFoundError(f"{self._name}: task {ordinal} does not exist: the data ends at {self.total}")
        epoch, place = divmod(ordinal, self.length)
        return self._epoch_order(epoch)[place] if self._shuffle else place

    def task(self, ordinal: int) -> dict[str, Any]:
        """The task as written; :class:`ConfigError` if it is no JSON object."""
        return self.at(self.line_of(ordinal))

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.length))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)  # noqa: S311 (reproducible, not secret)
            self._order = (epoch, order)
        return self._order[1]


class TaskSource(OrderedTasks):
    """The tasks of one JSONL file."""

    def __init__(self, path: Path, *, seed: int = 0, shuffle: bool = False, epochs: int | None = 1) -> None:
        """Raises :class:`ConfigError` if the file cannot be read, holds no task or has an empty line between tasks."""
        super().__init__(str(path), seed=seed, shuffle=shuffle, epochs=epochs)
        self.path = path
        self._starts = _line_starts(path)

    @property
    def length(self) -> int:
        return len(self._starts)

    def at(self, place: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self._starts[place])
            return _parse(self.path, place, file.readline())

    def problems(self) -> Iterator[str]:
        """What is wrong with the file, a message per bad line; reads all of it."""
        with self.path.open("rb") as file:
            for line, start in enumerate(self._starts):
                file.seek(start)
                try:
                    _parse(self.path, line, file.readline())
                except ConfigError as error:
                    yield str(error)


class ListedTasks(OrderedTasks):
    """A user's sequence: anything with a length whose items are found by place, e.g. a data set on disk."""

    def __init__(self, items: Sequence[Any], name: str, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        super().__init__(name, seed=seed, shuffle=shuffle, epochs=epochs)
        self._items = items

    @property
    def length(self) -> int:
        return len(self._items)

    def at(self, place: int) -> dict[str, Any]:
        return _object(self._items[place], f"{self._name}, task {place}")


class IteratedTasks:
    """A user's iterable: the ordinal is the position. Going back beyond :data:`KEPT` tasks starts it anew."""

    def __init__(self, make: Callable[[], Iterable[Any]], name: str) -> None:
        self._make = make
        self._name = name
        self._start()

    def task(self, ordinal: int) -> dict[str, Any]:
        if ordinal < self._position - len(self._kept):
            self._start()
        while self._position <= ordinal:
            try:
                item = next(self._items)
            except StopIteration:
                raise NotFoundError(f"{self._name}: the data ends at task {self._position}") from None
            self._kept.append(_object(item, f"{self._name}, task {self._position}"))
            self._position += 1
        return self._kept[ordinal - self._position]

    def _start(self) -> None:
        self._items = iter(self._make())
        self._position = 0
        """Of the next task that the iterator gives."""
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)


def source_for(spec: RunSpec, stream: str) -> Tasks:
    """The source behind ``train`` or ``eval/<version>`` of a run.

    Raises :class:`ConfigError` for an evaluation of a run without held-out tasks, and for a source of the user's that
    cannot do what the run file asks for.
    """
    if stream == "train":
        data = spec.data
        if data.source is not None:
            return _users(data.source, spec)
        return TaskSource(Path(data.path), seed=spec.seed, shuffle=data.shuffle, epochs=data.epochs)
    if spec.data.held_out is None:
        raise ConfigError(f"run {spec.run}: stream {stream!r} needs data.held_out in the run file")
    return TaskSource(Path(spec.data.held_out))


def data_end(spec: RunSpec) -> int | None:
    """Tasks of the training stream, all epochs together; None if it never ends, or tells only when it does."""
    if spec.data.source is not None:
        source = source_for(spec, "train")
        return source.total if isinstance(source, OrderedTasks) else None
    return None if spec.data.epochs is None else _total(spec.data.path, spec.data.epochs)


@functools.cache
def _total(path: str, epochs: int) -> int:
    return len(_line_starts(Path(path))) * epochs


def _users(target: str, spec: RunSpec) -> Tasks:
    data, factory = spec.data, load_target(target, spec.code)
    made = factory(data.path)
    if hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        return ListedTasks(made, target, seed=spec.seed, shuffle=data.shuffle, epochs=data.epochs)
    if data.shuffle or data.epochs is not None:
        raise ConfigError(
            f"data.source {target!r} returned {type(made).__name__}, which is read once and in its own order: set "
            "data.shuffle: false and leave data.epochs out, or return a sequence"
        )
    return IteratedTasks(lambda: factory(data.path), target)


def _object(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: a task is a JSON object, not {type(item).__name__}")
    return item


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
    return _object(task, f"{path}, line {line + 1}")
