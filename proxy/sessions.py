"""All sessions: who may speak, which are in memory, and how the others come back from the journal."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from proxy.generation import Services
from proxy.live_session import LiveSession
from proxy.peers import Peers, Pen
from proxy.runs import Runs
from proxy.trajectory import replay
from proxy.trajectory.policy import Policy
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.replay import Entry
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Outcome
from storage.errors import AuthenticationFailed, FencedError, SeamlessFlowError, SessionClosed
from storage.journal import Journal
from storage.ledger import Ledger, ProxyRecord, SampleKey, SessionRecord

KEEP_TOKENS = 8_000_000
"""Tokens of the sessions that stay in memory; those that nobody used for longest are dropped, and rebuilt when asked
for. A token of a prompt takes about 10 bytes, a sampled one up to 90."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session and its key, which exists in clear only here."""

    session: str
    api_key: str
    base_url: str
    model: str


class _Asleep(NamedTuple):
    """An open session that was dropped from memory, or is not there since the process started."""

    run: str
    interrupted: bool
    turns: int = 0
    forks: int = 0


class Sessions:
    """All sessions by id and by key.

    Sessions that nobody uses are kept as far as :data:`KEEP_TOKENS` allows, the latest first; the others exist in
    the journal only until they are asked for. Whoever holds a session holds the only one there is of it. Open sessions
    of other proxies (``peers``) are never here: asking for one raises Elsewhere.
    """

    def __init__(
        self, ledger: Ledger, journal: Journal, runs: Runs, services: Services, base_url: str, peers: Peers | None
    ) -> None:
        self.keep_tokens = KEEP_TOKENS
        self._peers = peers
        self._ledger = ledger
        self._journal = journal
        self._runs = runs
        self._services = services
        self._base_url = base_url.rstrip("/")
        self._live: WeakValueDictionary[str, LiveSession] = WeakValueDictionary()
        self._kept: OrderedDict[str, tuple[LiveSession, int]] = OrderedDict()
        self._weight = 0
        self._asleep: dict[str, _Asleep] = {}
        self._by_key: dict[str, str] = {}
        self._loading: dict[str, asyncio.Task[LiveSession]] = {}

    def require_lease(self) -> None:
        """Raises Elsewhere while new sessions would be nobody's."""
        if self._peers is not None:
            self._peers.require_lease()

    def new(
        self,
        run: str,
        policy: Policy,
        *,
        key: SampleKey | None = None,
        attempt: int = 0,
        parent: str | None = None,
        label: str | None = None,
        secret: bytes | None = None,
    ) -> tuple[NewSession, SessionRecord]:
        """A session that is to be entered by :meth:`create`; ``key`` and ``attempt`` say of which sample.

        The same 32 bytes of ``secret`` make the same session with the same key.
        """
        secret = secret or secrets.token_bytes(32)
        session, api_key = f"s{_derived(secret, b'id').hex()[:24]}", f"sfs_{_derived(secret, b'key').hex()}"
        facts: dict[str, Any] = {"parent": parent, "label": label, "proxy": self._peers.id if self._peers else None}
        record = SessionRecord(session, key_hash(api_key), run, key, attempt, policy.to_json(), **facts)
        return NewSession(session, api_key, f"{self._base_url}/s/{session}/v1", policy.model), record

    async def create(self, records: Sequence[SessionRecord]) -> None:
        """Enter new sessions; each record's key hash is its only key."""
        await asyncio.to_thread(self._ledger.put_session, *records)
        services = await asyncio.gather(*(self._own(record) for record in records))
        for record, mine in zip(records, services, strict=True):
            run = await self._runs.get(record.run)
            session = Session(record.session, record.run, Policy.from_json(dict(record.policy)), run.renderer)
            self._keep(LiveSession(mine, record, session))
            self._by_key[record.key_hash] = record.session

    async def authenticate(self, session: str | None, key: str) -> LiveSession:
        """The open session that ``key`` belongs to; ``session`` is the one its URL names, if any.

        Raises AuthenticationFailed, SessionClosed.
        """
        digest = key_hash(key)
        found, closed = self._by_key.get(digest), False
        if found is None:
            record = await asyncio.to_thread(self._ledger.session_by_key_hash, digest)
            if record is None:
                raise AuthenticationFailed("the API key is of no session: use the api_key that came with the session")
            found, closed = record.session, record.closed
        if session is not None and session != found:
            raise AuthenticationFailed(f"the API key is not of session {session!r}: each session has its own")
        if closed or (live := await self.get(found)).ended:
            raise SessionClosed(f"session {found} has ended: its attempt was finished or given up")
        self._by_key[digest] = found
        return live

    async def get(self, session: str) -> LiveSession:
        """The session, rebuilt from the journal if it is not in memory.

        Raises NotFoundError if there is none, Elsewhere if it is open and another proxy's.
        """
        live = self._live.get(session)
        if live is None:
            loading = self._loading.get(session)
            if loading is None:
                loading = asyncio.create_task(self._rebuild(session), name=f"rebuild {session}")
                self._loading[session] = loading
                loading.add_done_callback(lambda _: self._loading.pop(session, None))
            live = await asyncio.shield(loading)
        self._keep(live)
        return live

    async def record(self, session: str) -> SessionRecord:
        """Whose a session is. Raises NotFoundError."""
        live = self._live.get(session)
        return await asyncio.to_thread(self._ledger.session, session) if live is None else live.record

    async def owner(self, record: SessionRecord) -> ProxyRecord | None:
        """The other proxy that has the session; None: this one has it, or may."""
        return None if self._peers is None else await self._peers.owner(record)

    async def seal(self, live: LiveSession) -> Session:
        """End a session and those that were opened on its behalf."""
        try:
            sealed = await live.seal()
        except FencedError:  # another proxy took it: it is not here any more
            sealed = await self.seal(await self.get(live.record.session))
        self._asleep.pop(sealed.id, None)
        if not live.record.closed:
            await asyncio.to_thread(self._ledger.count_turns, sealed.id, len(sealed.turns), sealed.forks())
        for child in live.children:
            await self.end(child)
        return sealed

    async def end(self, session: str) -> None:
        """Seal a session, wherever it is, refuse its key from now on, and drop it from memory."""
        owner = await self.owner(await self.record(session))
        if owner is not None and self._peers is not None:
            try:
                await self._peers.client(owner.url).end_session(session)
            except SeamlessFlowError as error:  # its housekeeping will find it closed
                _log.warning("session %s is not sealed yet at %s: %s", session, owner.url, error)
        else:
            await self.seal(await self.get(session))
        await asyncio.to_thread(self._ledger.close_session, session)
        self.forget(session)

    def lose(self, session: str, error: Exception) -> None:
        """The session may be another proxy's now: what is told of it here ends with ``error``."""
        live = self._live.pop(session, None)
        if live is not None:
            self._drop(live, asleep=False)
            live.lose(error)

    def lose_all(self, error: Exception) -> None:
        """Every open session may be another proxy's now."""
        self._asleep.clear()
        for live in list(self._live.values()):
            if not live.ended:
                self.lose(live.record.session, error)

    def forget(self, session: str) -> None:
        """Drop a sealed session from memory; the journal keeps it."""
        live = self._live.get(session)
        if live is not None and live.session.sealed:
            self._drop(live)

    def turns(self, run: str) -> tuple[int, int]:
        """(turns, forks) of the open sessions of ``run`` here; the ledger has those of the others."""
        asleep = [(one.turns, one.forks) for one in self._asleep.values() if one.run == run]
        awake = [(len(o.session.turns), o.session.forks()) for o in self.live(run) if not o.ended]
        counts = asleep + awake
        return sum(turns for turns, _ in counts), sum(forks for _, forks in counts)

    async def recover(self, records: Sequence[SessionRecord]) -> None:
        """Note open sessions of an earlier process at once, then count the turns that they have had."""
        noted = [(record.session, _Asleep(record.run, True)) for record in records]
        self._asleep.update(noted)
        for session, asleep in noted:
            turns, forks = await asyncio.to_thread(count_turns, self._journal, session)
            if self._asleep.get(session) is asleep:
                self._asleep[session] = _Asleep(asleep.run, True, turns, forks)

    def live(self, run: str | None = None) -> list[LiveSession]:
        """Sessions of ``run``, or of all runs, that are kept in memory."""
        return [live for live, _ in self._kept.values() if run in (None, live.record.run)]

    async def close(self) -> None:
        """Stop every generation; their sessions go on in the next process."""
        await asyncio.gather(*(live.stop() for live in list(self._live.values())))

    def _keep(self, live: LiveSession) -> None:
        """Note that a session is used; those that were not for longest make room."""
        name, weight = live.record.session, live.weight
        known, before = self._kept.pop(name, (None, 0))
        if known is not live:
            self._live[name] = live
            self._asleep.pop(name, None)
        self._kept[name] = live, weight
        self._weight += weight - before
        for _ in range(2):  # a session that runs stays, and is looked at again when its turn comes again
            oldest, _ = next(iter(self._kept.values()))
            if self._weight <= self.keep_tokens or oldest is live:
                break
            if oldest.running():
                self._kept.move_to_end(oldest.record.session)
            else:
                self._drop(oldest)

    def _drop(self, live: LiveSession, *, asleep: bool = True) -> None:
        name = live.record.session
        _, weight = self._kept.pop(name, (live, 0))
        self._weight -= weight
        if asleep:
            self._by_key.pop(live.record.key_hash, None)
            if not live.ended:
                turns, forks = len(live.session.turns), live.session.forks()
                self._asleep[name] = _Asleep(live.record.run, live.interrupted, turns, forks)
        else:
            self._asleep.pop(name, None)

    async def _rebuild(self, session: str) -> LiveSession:
        record = await asyncio.to_thread(self._ledger.session, session)
        run = await self._runs.get(record.run)
        services = self._services if record.closed else await self._own(record)
        restored = await asyncio.to_thread(restore, self._journal, record, run.renderer)
        children = [child.session for child in await asyncio.to_thread(self._ledger.children_of, session)]
        asleep = self._asleep.get(session)
        interrupted = not record.closed if asleep is None else asleep.interrupted
        live = LiveSession(services, record, restored, interrupted=interrupted, children=children)
        self._live[session] = live
        return live

    async def _own(self, record: SessionRecord) -> Services:
        """Services that write into the session's journal as its owner."""
        if self._peers is None:
            return self._services
        return replace(self._services, journal=await self._peers.own(record, partial(self._fenced, record.session)))

    def _fenced(self, session: str, pen: Pen, error: FencedError) -> None:
        live = self._live.get(session)
        if live is not None and live.journal is pen:  # what is here now may be written with a newer one
            self.lose(session, error)


def restore(journal: Journal, record: SessionRecord, renderer: Renderer) -> Session:
    """A session as its journal describes it. Blocks: call it in a thread."""
    session = Session(record.session, record.run, Policy.from_json(dict(record.policy)), renderer)
    rows = journal.read(record.session)
    replay.replay(session, [Entry(row.kind, row.data, row.ids, row.logprobs) for row in rows])
    if record.closed:
        session.seal()
    return session


def count_turns(journal: Journal, session: str) -> tuple[int, int]:
    """(turns, forks) in the journal of a session. Blocks: call it in a thread."""
    outcomes = [row.data["outcome"] for row in journal.read(session) if row.kind == "turn"]
    return len(outcomes), outcomes.count(Outcome.FORK.value)


def _derived(secret: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(what, key=secret, digest_size=32).digest()


def key_hash(key: str) -> str:
    """How a session key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()
