"""What ends without anybody asking: sessions whose time is over or that were closed elsewhere, old journal records."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import NoReturn

from proxy.peers import Elsewhere
from proxy.samples import SampleDesk
from proxy.sessions import Sessions
from storage.collect import RetentionPolicy, collect
from storage.errors import SeamlessFlowError
from storage.journal import Journal
from storage.ledger import Ledger, SessionRecord
from workflows.spec import JournalSpec

SWEEP_S = 5.0
COLLECT_S = 60.0
TIME_LIMIT = "time_limit"
"""Cause of samples whose session expired: whoever ran the agent did not end it in time."""

_log = logging.getLogger(__name__)


class Housekeeping:
    """:meth:`run` sweeps until it is cancelled."""

    def __init__(self, ledger: Ledger, journal: Journal, sessions: Sessions, samples: SampleDesk) -> None:
        self._ledger = ledger
        self._journal = journal
        self._sessions = sessions
        self._samples = samples

    async def run(self) -> NoReturn:
        collected = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
                if time.monotonic() - collected > COLLECT_S:
                    await self.collect()
                    collected = time.monotonic()
            except SeamlessFlowError as error:
                _log.error("housekeeping is tried again in %g s: %s", SWEEP_S, error)

    async def collect(self) -> None:
        """Let journal records go that shards or checkpoints have superseded, as the runs' files say."""
        for info in await asyncio.to_thread(self._ledger.runs):
            spec = JournalSpec.model_validate(info.spec.get("journal", {}))
            if spec.keep_s is None:
                continue
            policy = RetentionPolicy(keep_s=spec.keep_s, outside_s=spec.keep_free_s)
            gone = await collect(self._ledger, self._journal, info.run, policy)
            if gone.sessions:
                _log.info("run %s: %d sessions left the journal (%d bytes)", info.run, gone.sessions, gone.bytes)

    async def sweep(self) -> None:
        """End what has to end; a session that cannot be ended now is tried again by the next sweep."""
        held = [live.record for live in self._sessions.live() if not live.session.sealed]
        records = await asyncio.to_thread(self._ledger.sessions_of, None, open_only=True)
        open_now = {record.session for record in records}
        now = time.time()
        for record in [*(record for record in held if record.session not in open_now), *records]:
            try:
                await self._look_at(record, open_now, now)
            except (SeamlessFlowError, Elsewhere) as error:
                _log.warning("session %s was not ended: %r", record.session, error)

    async def _look_at(self, record: SessionRecord, open_now: set[str], now: float) -> None:
        expires: float = record.policy.get("expires") or math.inf
        closed = record.session not in open_now or (record.parent is not None and record.parent not in open_now)
        if not (closed or now >= expires) or await self._sessions.owner(record) is not None:
            return
        if closed or record.key is None:
            await self._sessions.end(record.session)
        else:
            detail = f"the session was not finished within {expires - record.created:.0f} s"
            await self._samples.fail(record.run, record.session, TIME_LIMIT, detail, retry=False)
