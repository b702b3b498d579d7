"""Which weights made the tokens of a stream that is not over yet.

vLLM tells versions with the last event only, and a server that dies sends none. But a label that was the same before a
request began and after tokens of it had come is that of all these tokens: labels change while the server is paused, and
never back. So the label is read now and then while streams run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from storage.errors import EngineError
from workers.engines.base import VersionSpan
from workers.engines.vllm_stream import VllmStreamReader, version_of

EVERY_S = 0.25


@dataclass(slots=True, eq=False)
class Watched:
    """One stream."""

    reader: VllmStreamReader
    label: str
    """Read before its request was sent."""
    settled: int = 0
    """Tokens that were made under ``label``."""
    told: int = 0

    def news(self) -> tuple[VersionSpan, ...] | None:
        """The version of the first tokens, if more of them are settled than were told."""
        version = version_of(self.label)
        if version is None or self.settled <= self.told:
            return None
        self.told = self.settled
        return (VersionSpan(version, 0, self.settled),)


class Witness:
    """Reads one server's label while it is watched; ``read`` may raise :class:`EngineError`."""

    def __init__(self, read: Callable[[], Awaitable[str]]) -> None:
        self._read = read
        self._label: str | None = None
        self._streams: set[Watched] = set()
        self._task: asyncio.Task[None] | None = None

    async def before(self) -> str:
        """A recent label. One that is out of date by the time it is used settles nothing, and does no harm."""
        if self._label is None or self._task is None or self._task.done():
            self._label = await self._read()
        return self._label

    @contextlib.contextmanager
    def watching(self, reader: VllmStreamReader, label: str) -> Iterator[Watched]:
        """``label`` is from :meth:`before`, the request is sent within."""
        watched = Watched(reader, label)
        self._streams.add(watched)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            yield watched
        finally:
            self._streams.discard(watched)

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        """Until no stream is left."""
        while self._streams:
            await asyncio.sleep(EVERY_S)
            came = {watched: watched.reader.seen for watched in self._streams}
            try:
                self._label = await self._read()
            except EngineError:
                continue  # whoever reads the streams finds out what is wrong
            for watched, tokens in came.items():
                if watched.label == self._label:
                    watched.settled = tokens
