"""Garbage collection of the journal: what shards have superseded goes, its token counts stay.

The journal is the proxies' memory of living sessions; of a sample that was
trained on, filtered or failed nobody reads it again. Any proxy may collect at
any time, also two at once: what goes is decided by the ledger alone, and both
steps (remove, then note it) can be repeated.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from storage.books.retention import Superseded
from storage.journal import Journal
from storage.ledger import Ledger

_AT_ONCE = 100


@dataclass(frozen=True)
class RetentionPolicy:
    """How long the records of closed sessions are kept."""

    by: Superseded = "trained"
    """A sample's records go when it is ``trained`` (or ended otherwise), or already when its ``shard`` is committed."""
    keep_s: float = 3600.0
    """For this long after the end of a session they stay in any case."""
    outside_s: float | None = None
    """The same for sessions outside the sample queue, which no shard holds; None: for ever."""


@dataclass(frozen=True)
class Collected:
    """What was removed; ``bytes`` are those of the records themselves."""

    sessions: int = 0
    rows: int = 0
    bytes: int = 0


async def collect(ledger: Ledger, journal: Journal, run: str, policy: RetentionPolicy) -> Collected:
    """Remove the records of superseded sessions of a run from the journal.

    The ledger's record of each says then how many sampled tokens it had
    (:attr:`~storage.ledger.SessionRecord.collected`), and the journal's token counts stay what they were.
    """
    now = time.time()
    outside_before = None if policy.outside_s is None else now - policy.outside_s
    total = Collected()
    while True:
        sessions = await asyncio.to_thread(
            ledger.superseded,
            run,
            by=policy.by,
            ended_before=now - policy.keep_s,
            outside_before=outside_before,
            limit=_AT_ONCE,
        )
        if not sessions:
            return total
        removed = await journal.delete(*sessions)
        # One that never wrote is unknown to the journal.
        held = {session: removed.tokens[session].sampled if session in removed.tokens else 0 for session in sessions}
        await asyncio.to_thread(ledger.mark_collected, held)
        total = Collected(total.sessions + len(sessions), total.rows + removed.rows, total.bytes + removed.bytes)
