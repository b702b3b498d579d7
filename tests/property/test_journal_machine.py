"""Whatever proxies append, take over, close, remove and restart: the journal holds what it acknowledged, in order."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from postgres import PostgresServer

from storage.errors import FencedError
from storage.journal import CLOSED, Journal, JournalRecord, TokenCounts, open_journal

T = TypeVar("T")
PROXIES = st.integers(0, 2)
SESSIONS = st.sampled_from(["a", "b", "c"])


class JournalMachine(RuleBasedStateMachine):
    """Three proxies over one journal, each of which remembers the epochs it was once given."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.journals = [open_journal(url) for _ in range(3)]
        self.mine: list[dict[str, int]] = [{}, {}, {}]
        self.epochs: dict[str, int] = defaultdict(int)
        self.held: dict[str, list[int]] = defaultdict(list)
        self.open: dict[str, bool] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.next = 0

    def teardown(self) -> None:
        for journal in self.journals:
            journal.close()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(proxy=PROXIES, session=SESSIONS)
    def take(self, proxy: int, session: str) -> None:
        epoch = self.run(self.journals[proxy].take(session, f"proxy-{proxy}"))
        assert epoch > self.epochs[session]
        self.epochs[session] = self.mine[proxy][session] = epoch
        self.open.setdefault(session, True)

    @rule(
        proxy=PROXIES, sessions=st.lists(SESSIONS, min_size=1, max_size=4), size=st.integers(0, 3), ends=st.booleans()
    )
    def append_at_once(self, proxy: int, sessions: list[str], size: int, ends: bool) -> None:
        """One append for each session named, all waiting together, with the epochs this proxy knows of."""
        calls = []
        for session in sessions:
            ids = list(range(self.next, self.next + size))
            self.next += size
            array = np.array(ids, dtype=np.int32)
            records = [JournalRecord(session, "chunk", {}, array, np.zeros(size, dtype=np.float32))]
            if ends:
                records.append(JournalRecord(session, CLOSED, {}))
            calls.append((session, ids, self.mine[proxy].get(session), records))
        journal = self.journals[proxy]

        async def together() -> list[Any]:
            appends = (journal.append(*records, epoch=epoch) for _, _, epoch, records in calls)
            return await asyncio.gather(*appends, return_exceptions=True)

        for (session, ids, epoch, _), outcome in zip(calls, self.run(together()), strict=True):
            if epoch is not None and epoch != self.epochs[session]:
                assert isinstance(outcome, FencedError)
                continue
            assert outcome is None
            self.held[session] += ids
            self.counts[session] += size
            self.open[session] = self.open.get(session, True) and not ends

    @rule(proxy=PROXIES, session=SESSIONS)
    def remove(self, proxy: int, session: str) -> None:
        removed = self.run(self.journals[proxy].delete(session))
        assert removed.bytes >= 8 * len(self.held[session])
        self.held[session] = []
        if session in self.open:
            self.epochs[session] += 1

    @rule(proxy=PROXIES)
    def restart(self, proxy: int) -> None:
        self.journals[proxy].close()
        self.journals[proxy] = open_journal(self.url)

    @invariant()
    def all_see_what_was_acknowledged(self) -> None:
        for journal in self.journals:
            for session, ids in self.held.items():
                assert _ids(journal, session) == ids
            assert set(journal.open_sessions()) == {session for session, is_open in self.open.items() if is_open}
            total = sum(self.counts.values())
            assert journal.tokens() == TokenCounts(total, total)
        by_session = {session: TokenCounts(self.counts[session], self.counts[session]) for session in self.open}
        assert self.journals[0].tokens_by_session() == by_session


def _ids(journal: Journal, session: str) -> list[int]:
    return [int(number) for record in journal.read(session) if record.ids is not None for number in record.ids]


SETTINGS = settings(max_examples=15, stateful_step_count=25, suppress_health_check=list(HealthCheck))


def test_the_journal_holds_what_it_acknowledged_on_sqlite(tmp_path: Path) -> None:
    names = itertools.count()
    run_state_machine_as_test(lambda: JournalMachine(f"sqlite:///{tmp_path}/{next(names)}.db"), settings=SETTINGS)


def test_the_journal_holds_what_it_acknowledged_on_postgresql(postgres: PostgresServer) -> None:
    run_state_machine_as_test(lambda: JournalMachine(postgres.database()), settings=SETTINGS)
