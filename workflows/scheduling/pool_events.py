"""All that can happen to a pool, as values: the pool is a function of its event log.

``ResourcePool`` turns each message into one event; in Temporal's history these
messages are the log. The same fold rebuilds the pool anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from workflows.scheduling import pool as pools
from workflows.scheduling.pool_state import Demand, Node, Outcome, Pool, Share, Value


class Added(Value):
    node: Node


class Tagged(Value):
    node: str
    tags: frozenset[str]


class Drained(Value):
    node: str
    reason: str
    undo: bool = False


class Removed(Value):
    node: str
    reason: str


class Preempted(Value):
    node: str
    reason: str
    hold: bool = False


class Seen(Value):
    node: str
    boot_id: str
    shares: frozenset[str] = frozenset()


class Lost(Value):
    node: str
    reason: str


class Profiled(Value):
    node: str
    train_priority: float


class Ticked(Value):
    lost_after: float


class Requested(Value):
    demand: Demand
    share: Share | None = None


class Withdrawn(Value):
    request_id: str
    reason: str


class Released(Value):
    lease: str
    epoch: int


class Shared(Value):
    run: str
    priority: int = 0
    quota: int | None = None


NodeEvent = Added | Tagged | Drained | Removed | Preempted | Seen | Lost | Profiled
RunEvent = Requested | Withdrawn | Released | Shared
Event = NodeEvent | RunEvent | Ticked


def apply(pool: Pool, event: Event, at: float) -> Outcome:
    """The pool after ``event`` at unix second ``at``, and the actions owed. An event on an unknown node is ignored."""
    pool = pool.model_copy(update={"now": at})
    match event:
        case Ticked():
            return pools.tick(pool, at, lost_after=event.lost_after)
        case Requested() | Withdrawn() | Released() | Shared():
            return _of_run(pool, event)
        case Added():
            return pools.add_node(pool, event.node, at)
        case _:
            return _of_node(pool, event, at) if event.node in pool.nodes else Outcome(pool, [])


def replay(events: Iterable[tuple[float, Event]], pool: Pool | None = None) -> Pool:
    """The pool that a log of (unix seconds, event) leads to."""
    pool = pool or Pool()
    for at, event in events:
        pool = apply(pool, event, at).pool
    return pool


def _of_run(pool: Pool, event: RunEvent) -> Outcome:
    match event:
        case Requested():
            return pools.request(pool, event.demand, event.share)
        case Withdrawn():
            return pools.withdraw(pool, event.request_id, event.reason)
        case Released():
            return pools.released(pool, event.lease, event.epoch)
        case Shared():
            return pools.set_share(pool, event.run, priority=event.priority, quota=event.quota)
        case _:
            assert_never(event)


def _of_node(pool: Pool, event: Tagged | Drained | Removed | Preempted | Seen | Lost | Profiled, at: float) -> Outcome:
    match event:
        case Tagged():
            return pools.set_tags(pool, event.node, event.tags)
        case Drained():
            return pools.drain(pool, event.node, event.reason, undo=event.undo)
        case Removed():
            return pools.remove_node(pool, event.node, event.reason)
        case Preempted():
            return pools.preempt(pool, event.node, event.reason, hold=event.hold)
        case Seen():
            return pools.node_seen(pool, event.node, event.boot_id, at, event.shares)
        case Lost():
            return pools.node_lost(pool, event.node, event.reason)
        case Profiled():
            return pools.profiled(pool, event.node, event.train_priority)
        case _:
            assert_never(event)
