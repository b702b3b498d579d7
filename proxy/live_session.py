"""One living session: who it is of, and one answer per turn, which retries find again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from proxy.answering import Answering
from proxy.dialects.base import TurnRequest
from proxy.generation import JournalWriter, Services, journal_records
from proxy.ids import new_id
from proxy.scribe import Scribe
from proxy.trajectory import replay
from proxy.trajectory.replay import Entry
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Turn
from storage.errors import SeamlessFlowError
from storage.journal import CLOSED
from storage.ledger import SessionRecord

_LARGE_REQUEST = 128 * 1024
"""Bytes of body above which rendering and tokenizing leave the event loop."""
_TURN_TOKENS = 500
"""What the records of a turn weigh, in tokens."""
_KEPT_ANSWERS = 8
"""Answers of a session that a retry finds as they were told; those of older turns are made from their recording."""

_log = logging.getLogger(__name__)


class LiveSession:
    """A session with its running generations. ``record`` says whose it is, ``children`` who works on its behalf.

    ``interrupted``: it was open when an earlier proxy process ended, so its agent may have seen connections break.
    """

    def __init__(
        self,
        services: Services,
        record: SessionRecord,
        session: Session,
        *,
        interrupted: bool = False,
        children: Sequence[str] = (),
    ) -> None:
        self.record = record
        self.session = session
        self.interrupted = interrupted
        self.children = list(children)
        self.sealing = asyncio.Lock()
        """Held while the session ends, and by those who must not see that half done."""
        self._journal = services.journal
        self._scribe = Scribe(services.journal, f"session {session.id}")
        self._services = replace(services, journal=self._scribe)
        self._answering: dict[int, Answering] = {}
        self._placing = asyncio.Lock()

    @property
    def journal(self) -> JournalWriter:
        """What its records are written with."""
        return self._journal

    @property
    def ended(self) -> bool:
        """Whether its key opens nothing any more."""
        return self.session.sealed or self.record.closed

    @property
    def weight(self) -> int:
        """What it costs to keep, in tokens."""
        return self.session.tree.size + _TURN_TOKENS * (1 + len(self.session.turns))

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

    async def prompt_length(self, request: TurnRequest) -> int:
        """Tokens that the prompt of ``request`` would have; changes nothing."""
        session = self.session
        async with self._placing:
            placement = await asyncio.to_thread(session.place, session.resolve(request), time.time())
            return session.prompt_length(placement)

    async def request(
        self, request: TurnRequest, body: bytes, *, retried: bool, idempotency_key: str, turn: int | None = None
    ) -> Answering:
        """The answer to ``request``: a new one, or for a retry the one it had; a number of its ``turn`` says which.

        The caller is attached to it until it calls :meth:`part`. Raises RequestError.
        """
        digest = hashlib.sha256(body).hexdigest()  # OpenSSL: the fastest here
        async with self._placing:
            found = self.session.find_retry(digest, idempotency_key, retried=retried)
            if turn is not None:
                found = self.session.turn_of(digest, turn)
            if found is not None and not self.session.sealed:
                return await self._resume(found, whole=not request.stream)
            return await self._begin(request, len(body), digest, idempotency_key)

    async def part(self, answering: Answering, *, told: bool) -> None:
        """A reader of an answer goes; ``told``: after all of it was written to its client."""
        answering.detach(told=told)
        if answering.left and not self.session.sealed:
            try:
                await self._mark_left(answering.turn, True)
            except SeamlessFlowError as error:
                _log.error("session %s: the journal does not know that a client left: %s", self.session.id, error)

    async def stop(self) -> None:
        """End all generations; what they made stays and can be continued."""
        for answering in list(self._answering.values()):
            answering.stop()
            await answering.gone()
        await self._scribe.flush()

    def lose(self, error: Exception) -> None:
        """The session is not ours any more: who waits for an answer gets ``error``."""
        for answering in self._answering.values():
            answering.lose(error)

    async def seal(self) -> Session:
        """End all generations and close the session in the journal; once only."""
        async with self.sealing, self._placing:
            if not self.session.sealed:
                await self.stop()
                self.session.seal()
                await self._services.journal.append(*journal_records(self.session.id, [Entry(CLOSED, {})]))
                self._answering.clear()
        return self.session

    async def _begin(self, request: TurnRequest, size: int, digest: str, key: str) -> Answering:
        session = self.session
        self._scribe.check()
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
        self._scribe.note(*journal_records(session.id, [replay.turn_entry(session, turn, placement)]))
        return self._attach(Answering(self._services, session, turn, whole=not request.stream))

    async def _resume(self, turn: Turn, *, whole: bool) -> Answering:
        """Attach to the turn's answer, which may be running, over, or left when its client went away."""
        answering = self._answering.get(turn.index)
        if answering is not None and answering.leaving:
            await answering.gone()
        if turn.left:
            await self._mark_left(turn, False)
        aborted = [choice for choice in turn.choices if choice.status == "aborted"]
        for choice in aborted:
            choice.status = "open"
        if aborted or answering is None:
            answering = Answering(self._services, self.session, turn, whole=whole)
        return self._attach(answering)

    async def _mark_left(self, turn: Turn, left: bool) -> None:
        turn.left = left
        await self._services.journal.append(*journal_records(self.session.id, [replay.left_entry(turn)]))

    def _attach(self, answering: Answering) -> Answering:
        answering.attach()
        self._answering[answering.turn.index] = answering
        for index in [index for index, other in self._answering.items() if other.done][:-_KEPT_ANSWERS]:
            del self._answering[index]
        return answering
