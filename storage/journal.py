"""The journal: an append-only record of every token, committed before an agent sees it (I3).

Commits are grouped (see :mod:`storage.group_commit`). It lies in a SQLite file
for the proxies of one host, or on a PostgreSQL server for those of several.
"""

from __future__ import annotations

from pathlib import Path

from storage.databases import Durability, database_url
from storage.journals.base import CLOSED, Journal, JournalRecord, Removed, TokenCounts
from storage.journals.sqlite import SqliteJournal

__all__ = ["CLOSED", "Journal", "JournalRecord", "Removed", "TokenCounts", "open_journal"]


def open_journal(url: str, durability: Durability = "process") -> Journal:
    """The journal at ``sqlite:///<file>`` or ``postgresql://user:password@host/database``.

    Args:
        url: where it lies; made if it is not there.
        durability: what an acknowledged record survives: ``"process"`` any crash of ours, ``"power"`` also a power cut.

    Raises:
        ConfigError: the URL names no database that can hold a journal.
    """
    parsed = database_url("journal", url)
    if parsed.drivername == "sqlite":
        return SqliteJournal(Path(parsed.database or ""), durability)
    # Its driver is no part of every role's environment.
    from storage.journals.postgres import PostgresJournal

    return PostgresJournal(parsed, durability)
