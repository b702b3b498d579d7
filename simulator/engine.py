"""One node's engine: continuous batching in closed form.

Every decode step gives each running session one token, so a counter of steps is the only state that moves: a session
that joins at step v with n tokens to write ends at step v + n. How long a number of steps takes while the batch stays
as it is follows from the roofline in one formula (:func:`simulator.service.seconds_of`). So an engine has an event
where its batch changes and none in between, whatever the lengths.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable

import simpy

from simulator.measure import Activity, NodeClock
from simulator.service import Service, seconds_of, steps_in
from simulator.sessions import Session

OVERFLOW_FREES = 0.05
"""Share of the KV that is freed at a time when it is full: the youngest sessions are put back."""
FILLS = 0.9
"""Share of the KV up to which sessions are let in."""
_NEARLY = 1e-6


class Engine:
    """Decodes sessions on one node. The caller routes them here and is told of each turn that ends.

    ``seats``: sessions whose KV it is expected to hold. ``version``: its weights.
    """

    def __init__(
        self, env: simpy.Environment, name: str, service: Service, seats: int, clock: NodeClock,
        turns_ended: Callable[[Engine, list[Session]], None], put_back: Callable[[Session], None],
    ) -> None:  # fmt: skip
        self.name = name
        self._service = service
        self.seats = max(1, seats)
        self.clock = clock
        self.version = 0
        self.serving = False
        self.bound = 0
        """Sessions whose KV is here, those with their tools included."""
        self.tokens_written = 0.0
        self._env = env
        self._turns_ended = turns_ended
        self._put_back = put_back
        self._batch: list[tuple[float, int, Session]] = []
        self._order = itertools.count()
        self._context = 0.0
        self._idle_kv: dict[Session, None] = {}
        self._idle_tokens = 0.0
        self._kv = float(service.kv_tokens)
        self._steps = 0.0
        self._at = 0.0
        """Time that the counter of steps stands for; in the future while prompts are read or weights loaded."""
        self._synced_at = 0.0
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        self._planned = 0

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def load(self) -> float:
        """Taken share of the seats: what the router balances."""
        return self.bound / self.seats

    def accepts(self, session: Session) -> bool:
        """Whether there is a seat and room for the session's conversation."""
        if not self.serving or self.bound >= self.seats:
            return False
        return not self.bound or self._context + self._idle_tokens + session.context <= self._kv * FILLS

    # Life

    def start(self, version: int) -> None:
        """Serve with these weights; nothing is in its KV."""
        self.serving = True
        self._at = self._env.now
        self._set_version(version)
        self.plan()

    def stop(self) -> list[Session]:
        """End service at once; returns the sessions that were decoding. All go on elsewhere, without their KV."""
        self._advance()
        cut = [session for _, _, session in self._batch]
        for session in cut:
            self._leave(session)
        for session in (*cut, *self._idle_kv):
            session.engine = None
            session.unread = session.context
        self._batch.clear()
        self._idle_kv.clear()
        self._context = self._idle_tokens = 0.0
        self.bound, self.serving = 0, False
        self._planned += 1
        return cut

    def hold(self, seconds: float, version: int) -> None:
        """Stop for ``seconds`` to load weights, with the KV kept; then the batch goes on where it was."""
        self._advance()
        self._set_version(version)
        self._at = max(self._at, self._env.now) + seconds
        self._synced_at = self._env.now + seconds
        self.plan()
        self._env.timeout(seconds).callbacks.append(lambda _: self._show())

    # Sessions

    def join(self, session: Session) -> None:
        """Take a turn into the batch: its unread tokens are read first, which stops the others as long.

        The caller calls :meth:`plan` once it has added all it has.
        """
        self._advance()
        unread = session.unread
        if session.engine is not self:
            session.engine = self
            self.bound += 1
        elif session in self._idle_kv:
            del self._idle_kv[session]
            self._idle_tokens -= session.context - unread
        if unread:
            self._at += self._service.prefill_s(unread, session.context - unread)
            session.unread = 0.0
        self._context += session.context
        session.context += session.remaining
        session.began_at = self._steps
        session.ends_at = self._steps + session.remaining
        heapq.heappush(self._batch, (session.ends_at, next(self._order), session))

    def part(self, session: Session) -> None:
        """The session ends, or goes elsewhere: its KV is free."""
        if session in self._idle_kv:
            del self._idle_kv[session]
            self._idle_tokens -= session.context - session.unread
        session.engine = None
        self.bound -= 1

    # Time

    def _advance(self) -> None:
        """Bring the counter of steps to now."""
        now = self._env.now
        if now <= self._at:
            return
        batch = len(self._batch)
        if batch:
            steps = steps_in(self._service.line(batch), batch, self._context, now - self._at)
            self._steps += steps
            self._context += batch * steps
        self._at = now

    def plan(self) -> None:
        """Schedule the next change of the batch: a turn ends, or the KV is full."""
        self._planned += 1
        self._show()
        batch = len(self._batch)
        if not batch:
            return
        steps = self._batch[0][0] - self._steps
        if batch > 1 or self._idle_kv:
            steps = min(steps, (self._kv - self._context - self._idle_tokens) / batch)
        wait = self._at - self._env.now
        if steps > 0:
            wait += seconds_of(self._service.line(batch), batch, self._context, steps)
        simpy.Timeout(self._env, wait if wait > 0 else 0.0, self._planned).callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._planned:
            return
        self._advance()
        batch = self._batch
        if self._context + self._idle_tokens >= self._kv - 1 and (len(batch) > 1 or self._idle_kv):
            self._make_room()
            batch = self._batch
        due = self._steps + _NEARLY
        ended = []
        while batch and batch[0][0] <= due:
            session = heapq.heappop(batch)[2]
            self._leave(session)
            session.remaining = 0.0
            self._idle_kv[session] = None
            self._idle_tokens += session.context
            ended.append(session)
        self._turns_ended(self, ended)
        self.plan()

    def _show(self) -> None:
        if self.serving:
            busy: Activity = "decode" if self._batch else "rollout_idle"
            self.clock.change(self._env.now, "sync" if self._env.now < self._synced_at else busy)

    def _leave(self, session: Session) -> None:
        """Out of the batch: book what it wrote, by the version that wrote it."""
        left = max(0.0, session.ends_at - self._steps)
        session.remaining = left
        session.context -= left
        self._context -= session.context
        end = min(self._steps, session.ends_at)
        self.tokens_written += end - session.began_at
        if session.began_at >= self._versions[-1][0]:  # the common case: one version wrote it all
            version = self._versions[-1][1]
            if session.first_version is None and end > session.began_at:
                session.first_version = version
            session.version_tokens += (end - session.began_at) * version
            return
        first = bisect_right(self._versions, (session.began_at, math.inf)) - 1
        if session.first_version is None and end > session.began_at:
            session.first_version = self._versions[first][1]
        for i in range(first, len(self._versions)):
            since, version = self._versions[i]
            until = self._versions[i + 1][0] if i + 1 < len(self._versions) else math.inf
            session.version_tokens += max(0.0, min(end, until) - max(session.began_at, since)) * version

    def _make_room(self) -> None:
        """Drop the KV of sessions that are with their tools, then put back the youngest that run."""
        wanted = self._kv * (1 - OVERFLOW_FREES)
        while self._idle_kv and self._context + self._idle_tokens > wanted:
            session = next(iter(self._idle_kv))
            self.part(session)
            session.unread = session.context
        youngest = sorted(self._batch, key=lambda entry: -entry[2].began_at)
        out: list[Session] = []
        while len(self._batch) - len(out) > 1 and self._context > wanted:
            session = youngest[len(out)][2]
            self._leave(session)
            out.append(session)
        if not out:
            return
        gone = set(map(id, out))
        self._batch = [entry for entry in self._batch if id(entry[2]) not in gone]
        heapq.heapify(self._batch)
        for session in out:
            session.unread = session.context
            session.engine = None
            self.bound -= 1
            self._put_back(session)

    def _set_version(self, version: int) -> None:
        self.version = version
        if self._steps > self._versions[-1][0]:
            self._versions.append((self._steps, version))
        else:
            self._versions[-1] = (self._steps, version)
        if len(self._versions) > 64:
            del self._versions[:32]
