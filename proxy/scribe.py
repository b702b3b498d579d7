"""One session's records on their way into the journal, in order."""

from __future__ import annotations

import asyncio
import logging

from proxy.generation import JournalWriter
from storage.errors import SeamlessFlowError, StorageError
from storage.journal import JournalRecord

_NOTED_S = 0.05
"""A record that nobody waits for is in the journal after so long, if nothing takes it there before."""

_log = logging.getLogger(__name__)


class Scribe:
    """Writes for one session, ``what`` in errors. What is noted goes with the next append, in the same transaction.

    If noted records did not get into the journal, nothing may follow them there: every later append is refused.
    """

    def __init__(self, journal: JournalWriter, what: str) -> None:
        self._journal = journal
        self._what = what
        self._noted: list[JournalRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._carrying = asyncio.Lock()
        self._broken = False

    def check(self) -> None:
        """Raises StorageError if nothing can be written any more."""
        if self._broken:
            raise StorageError(f"{self._what} has a turn that is not in the journal")

    def note(self, *records: JournalRecord) -> None:
        """Records that need not be in the journal before what follows them there."""
        self._noted += records
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NOTED_S, self._flush)

    async def append(self, *records: JournalRecord) -> None:
        """As the journal's, behind all that was noted."""
        if not self._noted:
            if self._carrying.locked():
                async with self._carrying:
                    pass
            self.check()
            if records:
                await self._journal.append(*records)
            return
        async with self._carrying:
            self.check()
            noted, self._noted = self._noted, []
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                await self._journal.append(*noted, *records)
            except Exception:
                self._broken = self._broken or bool(noted)
                raise

    async def flush(self) -> None:
        """Write what was noted; a failure is in the log, and told to whoever appends next."""
        try:
            await self.append()
        except SeamlessFlowError as error:
            _log.error("%s: a turn is not in the journal: %s", self._what, error)

    def _flush(self) -> None:
        self._timer = None
        self._flushing = asyncio.create_task(self.flush(), name=f"open turn of {self._what}")
