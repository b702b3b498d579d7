"""The data plane: which samples start, where their turns run, and which groups are complete."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import simpy

from simulator.engine import Engine
from simulator.sessions import Session
from simulator.workload import Sessions
from workflows.scheduling.admission import AdmissionFacts, may_start
from workflows.scheduling.selection import Selection


@dataclass(slots=True)
class Group:
    """The samples of one task, counted as they are scored."""

    ordinal: int
    samples: int
    missing: int
    start_version: int
    tokens: int = 0
    trained_tokens: float = 0.0
    squares: float = 0.0
    """Sum of the squared lengths of its conversations: attention's part of the update."""
    version_tokens: float = 0.0
    completed: float = 0.0
    rewards: tuple[float, ...] = ()
    """Not simulated."""

    def score(self, session: Session) -> None:
        self.missing -= 1
        self.start_version = min(self.start_version, session.first_version or 0)
        self.tokens += int(session.tokens)
        length = session.context
        self.trained_tokens += length
        self.squares += length * length
        self.version_tokens += session.version_tokens


class Rollout:
    """Starts samples in ordinal order as far as they are admitted, sends each turn to the least loaded engine, or to
    the one that has the session's KV, and collects complete groups."""

    def __init__(
        self,
        env: simpy.Environment,
        sessions: Sessions,
        group_size: int,
        target: int,
        selection: Selection,
        complete: Callable[[], None],
    ) -> None:
        self._env = env
        self._sessions = sessions
        self._size = group_size
        self._target = target
        self._selection = selection
        self._complete = complete
        self._engines: list[Engine] = []
        self._numbers: dict[Engine, int] = {}
        self._free: list[tuple[float, int]] = []
        self._queue: deque[Session] = deque()
        self._admit_until = 0
        self._min_version = 0
        self._version = 0
        self._fresh_from: int | None = None
        self._serving = self._behind = 0
        self._bound: Callable[[int], int] = lambda ended: 0
        self._next: list[Session] = []
        self._groups: dict[int, Group] = {}
        self._capacity = 0
        self.ready: dict[int, Group] = {}
        """Complete groups that no step has taken, by ordinal."""
        self.produced = 0
        self.running = 0
        self._taken = 0
        self.completed = 0
        """Groups completed so far."""
        self.stale: list[Group] = []
        """Groups that ended because they were too old for every step to come."""

    # What is asked of it

    def open_step(self, version: int, min_version: int, admit_until: Callable[[int], int]) -> None:
        """The step that trains ``version`` begins, as soon as that is published: groups that were started by weights
        older than ``min_version`` are dropped from now on, and each is replaced by another.

        ``admit_until``: the ordinals below which tasks may start, by the number of groups that ended in vain. Those
        that were not admitted before wait until engines serve ``version``.
        """
        self._min_version = min_version
        self._bound = admit_until
        self._version, self._fresh_from = version, self._admit_until if version else None
        self.synced()
        for group in [g for g in self.ready.values() if g.start_version < min_version]:
            del self.ready[group.ordinal]
            self.stale.append(group)
        self._admit()

    def synced(self) -> None:
        """Engines serve other weights, or other engines serve."""
        serving = [engine for engine in self._engines if engine.serving]
        self._serving = len(serving)
        self._behind = sum(engine.version < self._version for engine in serving)
        self._start_more()

    def _admit(self) -> None:
        self._admit_until = max(self._admit_until, self._bound(len(self.stale)))
        self._start_more()

    def facts(self) -> AdmissionFacts:
        return AdmissionFacts(
            self.produced,
            self.running,
            self._admit_until,
            self._size,
            self._target,
            self._capacity or None,
            self._fresh_from,
            self._serving,
            self._behind,
        )

    @property
    def pending(self) -> int:
        """Samples on their way, those of complete groups included."""
        return self.produced - self._taken - sum(group.samples for group in self.stale)

    def take(self, count: int) -> list[Group]:
        """At most ``count`` complete groups, as the run selects them."""
        chosen = self._selection(tuple(self.ready.values()), min(count, len(self.ready)))
        groups = [self.ready.pop(ordinal) for ordinal in chosen]
        self._taken += sum(group.samples for group in groups)
        return groups

    def add(self, engine: Engine) -> None:
        """An engine serves from now on."""
        if engine not in self._numbers:
            self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
        self._capacity += engine.seats
        self._offer(engine)
        self.synced()
        self._route()

    def take_back(self, engine: Engine, cut: Iterable[Session]) -> None:
        """An engine stopped: what it decoded goes on elsewhere, before anything new."""
        self._capacity -= engine.seats
        self._serving -= 1
        self._behind -= engine.version < self._version
        self._queue.extendleft(cut)
        self._route()

    # Life of a session

    def _start_more(self) -> None:
        if self.produced >= self._admit_until * self._size:
            return
        _, count = may_start(self.facts())
        for _ in range(count):
            if not self._next:
                ordinal = self.produced // self._size
                group = self._sessions.group(ordinal)
                self._groups[ordinal] = Group(ordinal, len(group), len(group), 1 << 60)
                self._next = group[::-1]
            session = self._next.pop()
            self.produced += 1
            self.running += 1
            if session.reset_s > 0:
                self._later(session.reset_s, session, self._on_request)
            else:
                session.begin_turn()
                self._queue.append(session)
        if self._queue:
            self._route()

    def turns_ended(self, engine: Engine, sessions: list[Session]) -> None:
        """Called by an engine, which plans anew afterwards."""
        for session in sessions:
            if session.turn < len(session.answers) - 1:
                wait = session.tools_s[session.turn]
                session.turn += 1
                self._later(wait, session, self._on_request)
            else:
                engine.part(session)
                self._later(session.reward_s, session, self._on_scored)
        while self._queue and engine.accepts(self._queue[0]):
            engine.join(self._queue.popleft())
        self._offer(engine)

    def put_back(self, session: Session) -> None:
        """An engine that is full gives a session back."""
        self._queue.appendleft(session)

    def _on_request(self, event: simpy.Event) -> None:
        session = cast(Session, event.value)
        session.begin_turn()
        if session.engine is not None:
            session.engine.join(session)
            session.engine.plan()
            return
        self._queue.append(session)
        self._route()

    def _on_scored(self, event: simpy.Event) -> None:
        session = cast(Session, event.value)
        self.running -= 1
        group = self._groups[session.ordinal]
        group.score(session)
        if not group.missing:
            del self._groups[session.ordinal]
            self._collect(group)
        self._start_more()

    def _collect(self, group: Group) -> None:
        self.completed += 1
        group.completed = self._env.now
        if group.start_version < self._min_version:
            self.stale.append(group)
            self._admit()
        else:
            self.ready[group.ordinal] = group
            self._complete()

    def _later(self, seconds: float, session: Session, then: Callable[[simpy.Event], None]) -> None:
        simpy.Timeout(self._env, seconds, session).callbacks.append(then)

    # Routing

    def _route(self) -> None:
        """Send waiting turns to the least loaded engines while there is room."""
        changed: dict[Engine, None] = {}
        while self._queue:
            engine = self._least_loaded(self._queue[0])
            if engine is None:
                break
            engine.join(self._queue.popleft())
            changed[engine] = None
            self._offer(engine)
        for engine in changed:
            engine.plan()

    def _offer(self, engine: Engine) -> None:
        if engine.serving:
            heapq.heappush(self._free, (engine.load, self._numbers[engine]))

    def _least_loaded(self, session: Session) -> Engine | None:
        """Entries of engines whose load has changed since are passed over: each change made a new entry."""
        while self._free:
            load, number = heapq.heappop(self._free)
            engine = self._engines[number]
            if engine.load == load and engine.accepts(session):
                return engine
        return None
