"""Living sessions: who may speak, rebuilt from the journal when needed, one generation per turn."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence

from proxy.answering import Answering
from proxy.dialects.base import TurnRequest
from proxy.generation import Services, journal_records
from proxy.ids import new_id
from proxy.runs import Runs
from proxy.trajectory import replay
from proxy.trajectory.policy import Policy
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.replay import Entry
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Outcome, Turn
from storage.errors import AuthenticationFailed, SessionClosed
from storage.journal import CLOSED, Journal
from storage.ledger import Ledger, SessionRecord

_LARGE_REQUEST = 32 * 1024
"""Bytes of body above which rendering and tokenizing leave the event loop."""


class LiveSession:
    """A session with its running generations. ``record`` says whose it is.

    ``interrupted``: it was open when an earlier proxy process ended, so its agent may have seen connections break.
    """

    def __init__(
        self, services: Services, record: SessionRecord, session: Session, *, interrupted: bool = False
    ) -> None:
        self.record = record
        self.session = session
        self.interrupted = interrupted
        self._services = services
        self._answering: dict[int, Answering] = {}
        self._placing = asyncio.Lock()
        self._sealing = asyncio.Lock()

    @property
    def fault(self) -> str:
        """Why infrastructure failed one of its turns, or empty. Such a session is no evidence of the policy."""
        for turn, choice in self.session.generations():
            if choice.infra:
                return choice.fault
            if self.interrupted and choice.status == "aborted":
                return f"the proxy restarted during turn {turn.index}, which was never asked for again"
        return ""

    def running(self) -> int:
        """Turns that are being answered."""
        return sum(not answering.done for answering in self._answering.values())

    def prompt_length(self, request: TurnRequest) -> int:
        """Tokens that the prompt of ``request`` would have; changes nothing."""
        return self.session.prompt_length(self.session.place(self.session.resolve(request), time.time()))

    async def request(self, request: TurnRequest, body: bytes, *, retried: bool, idempotency_key: str) -> Answering:
        """The answer to ``request``: a new one, or for a retry the one it had.

        The caller is attached to it and must detach. Raises RequestError.
        """
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        async with self._placing:
            turn = self.session.find_retry(digest, idempotency_key, retried=retried)
            if turn is not None and not self.session.sealed:
                return await self._resume(turn)
            return await self._begin(request, len(body), digest, idempotency_key)

    async def stop(self) -> None:
        """End all generations; what they made stays and can be continued."""
        for answering in list(self._answering.values()):
            answering.stop()
            await answering.gone()

    async def seal(self) -> Session:
        """End all generations and close the session in the journal; once only."""
        async with self._sealing:
            if not self.session.sealed:
                await self.stop()
                self.session.seal()
                await self._services.journal.append(*journal_records(self.session.id, [Entry(CLOSED, {})]))
                self._answering.clear()
        return self.session

    async def _begin(self, request: TurnRequest, size: int, digest: str, key: str) -> Answering:
        session = self.session
        now = time.time()
        request = session.resolve(request)
        if size > _LARGE_REQUEST:
            placement = await asyncio.to_thread(session.place, request, now)
        else:
            placement = session.place(request, now)
        used = session.decide(placement, request)
        turn = session.begin(
            placement,
            request,
            used,
            generations=[new_id() for _ in range(request.n)],
            created=int(now),
            body_digest=digest,
            idempotency_key=key,
        )
        self._services.counters.turns[session.run] += 1
        self._services.counters.forks[session.run] += turn.outcome is Outcome.FORK
        records = journal_records(session.id, [replay.turn_entry(turn, placement)])
        opening = asyncio.create_task(self._services.journal.append(*records), name=f"open turn of {session.id}")
        return self._attach(Answering(self._services, session, turn, opening))

    async def _resume(self, turn: Turn) -> Answering:
        """Attach to the turn's answer, which may be running, over, or left when its client went away."""
        answering = self._answering.get(turn.index)
        if answering is not None and answering.leaving:
            await answering.gone()
        aborted = [choice for choice in turn.choices if choice.status == "aborted"]
        for choice in aborted:
            choice.status = "open"
        if aborted or answering is None:
            answering = Answering(self._services, self.session, turn)
        return self._attach(answering)

    def _attach(self, answering: Answering) -> Answering:
        answering.attach()
        self._answering[answering.turn.index] = answering
        return answering


class Sessions:
    """All sessions by id and by key."""

    def __init__(self, ledger: Ledger, journal: Journal, runs: Runs, services: Services) -> None:
        self._ledger = ledger
        self._journal = journal
        self._runs = runs
        self._services = services
        self._live: dict[str, LiveSession] = {}
        self._by_key: dict[str, str] = {}
        self._loading = asyncio.Lock()

    async def create(self, records: Sequence[SessionRecord]) -> None:
        """Enter new sessions; each record's key hash is its only key."""
        await asyncio.to_thread(self._ledger.put_session, *records)
        for record in records:
            run = await self._runs.get(record.run)
            session = Session(record.session, record.run, Policy.from_json(dict(record.policy)), run.renderer)
            self._live[record.session] = LiveSession(self._services, record, session)
            self._by_key[record.key_hash] = record.session

    async def authenticate(self, session: str | None, key: str) -> LiveSession:
        """The open session that ``key`` belongs to; ``session`` is the one its URL names, if any.

        Raises AuthenticationFailed, SessionClosed.
        """
        digest = key_hash(key)
        found = self._by_key.get(digest)
        if found is None:
            record = await asyncio.to_thread(self._ledger.session_by_key_hash, digest)
            if record is None:
                raise AuthenticationFailed("the API key is of no session: use the api_key that came with the session")
            found = record.session
            self._by_key[digest] = found
        if session is not None and session != found:
            raise AuthenticationFailed(f"the API key is not of session {session!r}: each session has its own")
        live = await self.get(found)
        if live.session.sealed or live.record.closed:
            raise SessionClosed(f"session {found} has ended: its attempt was finished or given up")
        return live

    async def get(self, session: str) -> LiveSession:
        """Raises NotFoundError if there is no such session; rebuilds it from the journal if it is not in memory."""
        live = self._live.get(session)
        if live is None:
            async with self._loading:
                live = self._live.get(session) or await self._rebuild(session)
                self._live[session] = live
        return live

    def forget(self, session: str) -> None:
        """Drop a sealed session from memory; the journal keeps it."""
        live = self._live.get(session)
        if live is not None and live.session.sealed:
            del self._live[session]
            self._by_key.pop(live.record.key_hash, None)

    def in_flight(self, run: str) -> int:
        """Sessions of ``run`` in memory that are not sealed."""
        return sum(live.record.run == run and not live.session.sealed for live in self._live.values())

    def live(self, run: str) -> list[LiveSession]:
        """Sessions of ``run`` in memory."""
        return [live for live in self._live.values() if live.record.run == run]

    async def close(self) -> None:
        """Stop every generation; their sessions go on in the next process."""
        await asyncio.gather(*(live.stop() for live in self._live.values()))

    async def _rebuild(self, session: str) -> LiveSession:
        record = await asyncio.to_thread(self._ledger.session, session)
        run = await self._runs.get(record.run)
        restored = await asyncio.to_thread(restore, self._journal, record, run.renderer)
        return LiveSession(self._services, record, restored, interrupted=not record.closed)


def restore(journal: Journal, record: SessionRecord, renderer: Renderer) -> Session:
    """A session as its journal describes it. Blocks: call it in a thread."""
    session = Session(record.session, record.run, Policy.from_json(dict(record.policy)), renderer)
    rows = journal.read(record.session)
    replay.replay(session, [Entry(row.kind, row.data, row.ids, row.logprobs) for row in rows])
    if record.closed:
        session.seal()
    return session


def key_hash(key: str) -> str:
    """How a session key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()
