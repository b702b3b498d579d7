"""One proxy of several that share a ledger and a journal: its lease, its sessions, and what it asks the others.

A proxy that cannot renew its lease in time stops of its own accord: what ran is broken off, its sessions leave
memory, and others may take them over. Whoever takes a session gets a new epoch of it in the journal, so that nothing
of the owner before can come in behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import aiohttp

from proxy.client import ControlClient
from proxy.routes import DRAIN_LIMIT_S, RouteTable
from storage.errors import DeadlineError, FencedError, SeamlessFlowError, StorageError
from storage.journal import Journal, JournalRecord
from storage.ledger import Ledger, ProxyRecord, SessionRecord

LEASE_S = 10.0
RENEW_S = 2.0
MARGIN_S = 3.0
"""Before the others count the lease as over: time for what runs to let go of its engines."""
ASK_LIMIT_S = 5.0
"""How long another proxy has for an answer about itself."""
CONNECT_LIMIT_S = 2.0
PASS_LIMIT_S = 60.0
"""How long another proxy has for an answer to a request about one of its sessions."""
PASSED_ON = "x-seamlessflow-relayed"
"""Header of requests that come from another proxy: they are not passed on a second time."""

_log = logging.getLogger(__name__)


TURN = "x-seamlessflow-turn"
"""Header of a stream: the number of its turn."""
TOLD = "x-seamlessflow-told"
"""Header of a request for that stream again, ``<turn> <bytes>``: the client has so many already, keep-alives left out.
"""


class Elsewhere(Exception):  # no error: it says who to ask
    """Another proxy owns the session and lives, at ``url``; empty: nobody can say at the moment, ask again.

    ``hold_s``: how long the answer, which was begun here, may wait for an owner.
    """

    def __init__(self, url: str, *, hold_s: float | None = None) -> None:
        super().__init__(url)
        self.url = url
        self.hold_s = hold_s


class Pen:
    """Writes one session into the journal as its owner; ``fenced`` is called when another owner has taken it."""

    def __init__(self, journal: Journal, epoch: int, fenced: Callable[[Pen, FencedError], None]) -> None:
        self._journal = journal
        self._epoch = epoch
        self._fenced = fenced

    async def append(self, *records: JournalRecord) -> None:
        """As the journal's; raises FencedError once the session is another proxy's."""
        try:
            await self._journal.append(*records, epoch=self._epoch)
        except FencedError as error:
            self._fenced(self, error)
            raise


class PeerClient(ControlClient):
    """What proxies ask each other."""

    async def refresh_routes(self) -> None:
        """Returns when the ledger's routes are in force there."""
        await self._call("POST", "/control/peer/routes", {})

    async def end_session(self, session: str) -> None:
        """Seal a session that is owned there."""
        await self._call("POST", f"/control/peer/sessions/{session}/end", {})

    async def pass_on(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of another client's request, asked once; 503, which clients repeat, if there is no answer."""
        try:
            return await self._send(method, path, body, PASS_LIMIT_S, {PASSED_ON: "1"})
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            _log.info("%s %s was not passed on: %s", method, path, error)
            return 503, b""

    async def activity(self, run: str) -> dict[str, Any]:
        """What a run does there (:meth:`proxy.status.Status.activity`)."""
        return dict(await self._call("GET", f"/control/peer/runs/{run}"))


class Peers:
    """This process among the proxies of its cluster; ``url`` is where agents and other proxies reach it.

    ``lost`` is called with the reason when the lease has run out.
    """

    def __init__(self, ledger: Ledger, journal: Journal, routes: RouteTable, url: str, control_key: str) -> None:
        self.id = uuid.uuid4().hex
        self.url = url.rstrip("/")
        self.lost: Callable[[StorageError], None] = _log.error
        self._ledger = ledger
        self._journal = journal
        self._routes = routes
        self._key = control_key
        self._clients: dict[str, PeerClient] = {}
        self._http: aiohttp.ClientSession | None = None
        self._living: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._leased = asyncio.Event()

    async def start(self) -> None:
        """Get a lease and the routes. Whoever had our address before is dead: it is ours now."""
        for other in await asyncio.to_thread(self._ledger.proxies):
            if other.url == self.url:
                await asyncio.to_thread(self._ledger.retire_proxy, other.proxy)
        await self._register()
        self._routes.spread = self._spread
        self._spawn(self._keep(), "keep the proxy's lease")
        self._spawn(self._guard(), "watch the proxy's lease")

    async def close(self) -> None:
        """Give the lease back: from now on others may take what is ours."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        if self._http is not None:
            await self._http.close()
        await asyncio.to_thread(self._ledger.retire_proxy, self.id)

    # Sessions

    async def owner(self, record: SessionRecord) -> ProxyRecord | None:
        """The other proxy that owns the session and lives; None: it is ours, or may be."""
        if record.proxy in (None, self.id):
            return None
        found = [other for other in await asyncio.to_thread(self._ledger.proxies) if other.proxy == record.proxy]
        return found[0] if found else None

    async def own(self, record: SessionRecord, fenced: Callable[[Pen, FencedError], None]) -> Pen:
        """Make the session ours, if its owner is dead, and get a pen for it.

        Raises Elsewhere if its owner lives, or this proxy has no lease and cannot own anything: another can.
        """
        if not self._has_lease():
            others = [url for url in self._living if url != self.url]
            raise Elsewhere(secrets.choice(others) if others else "")
        owner, session = await self.owner(record), record.session
        if owner is not None:
            raise Elsewhere(owner.url)
        if record.proxy != self.id:
            try:
                await asyncio.to_thread(self._ledger.own_session, session, self.id, record.proxy)
            except FencedError:  # another proxy was faster
                raise Elsewhere("") from None
        return Pen(self._journal, await self._journal.take(session, self.id), fenced)

    def require_lease(self) -> None:
        """Raises Elsewhere while this proxy may not own anything."""
        if not self._has_lease():
            raise Elsewhere("")

    def _has_lease(self) -> bool:
        return self._leased.is_set() and time.monotonic() < self._routes.lease_until

    def lives(self, url: str) -> bool:
        """Whether the proxy there had a lease when ours was renewed last."""
        return url in self._living

    def client(self, url: str) -> PeerClient:
        """Client of another proxy."""
        if url not in self._clients:
            self._clients[url] = PeerClient(url, self._key, deadline_s=ASK_LIMIT_S)
        return self._clients[url]

    def http(self) -> aiohttp.ClientSession:
        """For agents' requests to other proxies: as many as there are, each as long as it takes."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._http

    # Runs and routes

    async def activities(self, run: str) -> list[dict[str, Any]]:
        """What ``run`` does at every other living proxy that answers."""
        others = [other for other in await asyncio.to_thread(self._ledger.proxies) if other.proxy != self.id]
        answers = [self.client(other.url).activity(run) for other in others]
        found = await asyncio.gather(*answers, return_exceptions=True)
        for other, answer in zip(others, found, strict=True):
            if isinstance(answer, BaseException):
                _log.warning("proxy at %s did not say what run %s does: %s", other.url, run, answer)
        return [answer for answer in found if isinstance(answer, dict)]

    async def refresh(self) -> None:
        """Returns when the ledger's routes are in force here, and that is acknowledged."""
        await self._routes.load()
        await self._renew()

    async def _spread(self, generation: int) -> None:
        """Returns when a generation of the routes is in force everywhere. Raises DeadlineError naming who is behind."""
        with contextlib.suppress(FencedError):  # without a lease we act on nothing, and are not waited for
            await self._renew()
        deadline = time.monotonic() + LEASE_S + DRAIN_LIMIT_S
        told: set[str] = set()
        while behind := await asyncio.to_thread(self._ledger.unacknowledged, generation):
            if time.monotonic() > deadline:
                urls = ", ".join(other.url for other in behind)
                raise DeadlineError(f"routes of generation {generation} are not in force yet at {urls}")
            for other in behind:
                if other.proxy not in told:
                    told.add(other.proxy)
                    self._spawn(self._tell(other), f"tell {other.url} of routes")
            await asyncio.sleep(0.05)

    async def _tell(self, other: ProxyRecord) -> None:
        try:
            await self.client(other.url).refresh_routes()
        except SeamlessFlowError as error:  # it will see by itself, or its lease runs out
            _log.warning("proxy at %s was not told of new routes: %s", other.url, error)

    # The lease

    async def _register(self) -> None:
        await asyncio.to_thread(self._ledger.register_proxy, self.id, self.url, LEASE_S)
        await self.refresh()

    async def _renew(self) -> None:
        asked = time.monotonic()
        newest = await asyncio.to_thread(self._ledger.renew_proxy, self.id, LEASE_S, self._routes.in_force)
        self._routes.renewed(asked + LEASE_S - MARGIN_S)
        self._leased.set()
        self._living = {other.url for other in await asyncio.to_thread(self._ledger.proxies)}
        if newest > self._routes.in_force and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._spawn(self._catch_up(), "catch up with routes")

    async def _catch_up(self) -> None:
        try:
            await self.refresh()
        except SeamlessFlowError as error:  # the next renewal sees that it is still behind
            _log.warning("routes are not in force here yet: %s", error)

    async def _keep(self) -> NoReturn:
        registered = True
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await (self._renew() if registered else self._register())
                registered = True
            except FencedError:
                self._end()
                registered = False
            except SeamlessFlowError as error:
                _log.error("the proxy's lease was not renewed: %s", error)

    async def _guard(self) -> NoReturn:
        while True:
            await self._leased.wait()
            left = self._routes.lease_until - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                self._end()

    def _end(self) -> None:
        """Others may act without us from now on."""
        self._leased.clear()
        self._routes.suspend()
        self.lost(StorageError("this proxy could not renew its lease: its sessions may be another proxy's now"))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
