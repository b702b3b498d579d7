"""What a run looks like from the proxy: for people, the CLI and the audit."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict
from statistics import fmean
from typing import Any

from proxy.meter import Counters
from proxy.peers import Peers
from proxy.routes import RouteTable
from proxy.runs import Runs
from proxy.sessions import Sessions
from proxy.shard_writer import ShardWriter
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Turn
from storage.journal import Journal
from storage.ledger import TRAIN, Failure, Ledger, SampleRow, State
from storage.metrics import overlap_fraction

_RATE_WINDOW_S = 10.0
_TEXTS = ("live", "waits_for")
"""Of what a process knows of a run: what is no number."""
_DONE = (State.SCORED, State.TRAINED, State.FILTERED, State.FAILED)


class Rate:
    """Tokens per second over the last seconds, from samples of a growing count."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, count: int) -> None:
        """Called every second or so."""
        now = time.monotonic()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[0][0] > _RATE_WINDOW_S:
            self._points.popleft()

    def per_s(self) -> float:
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / max(end - start, 1e-9)


class Status:
    """Answers ``GET /control/runs/{run}``; where there are ``peers``, for all of them."""

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        runs: Runs,
        sessions: Sessions,
        routes: RouteTable,
        counters: Counters,
        writer: ShardWriter,
        peers: Peers | None,
    ) -> None:
        self._writer = writer
        self._peers = peers
        self._ledger = ledger
        self._journal = journal
        self._runs = runs
        self._sessions = sessions
        self._routes = routes
        self._counters = counters
        self.rate = Rate()

    async def run(self, name: str) -> dict[str, Any]:
        """Raises NotFoundError for an unknown run."""
        await self._runs.get(name)
        here = self.activity(name)
        others = [] if self._peers is None else await self._peers.activities(name)
        total = {what: sum(one[what] for one in (here, *others)) for what in here if what not in _TEXTS}
        live = Counter(here["live"])
        for other in others:
            live.update(other["live"])
        facts = await asyncio.to_thread(self._facts, name)
        (turns, forks), journalled, unwritten = (facts.pop(what) for what in ("noted", "journalled", "unwritten"))
        return {
            "run": name,
            **facts,
            "tokens": {
                "journalled": journalled,
                "delivered": total["delivered"],
                "undelivered": total["undelivered"],
                "per_s": round(total["per_s"], 2),
            },
            "generations_in_flight": total["generations"],
            "shards": {
                "unwritten_groups": unwritten[0],
                "unwritten_tokens": unwritten[1],
                "waits_for": next((one["waits_for"] for one in (here, *others) if one["waits_for"]), ""),
            },
            "turns": turns + total["turns"],
            "forks": forks + total["forks"],
            "routes": [{**route, "live": live[route["lease"]]} for route in self._routes.describe(name)],
        }

    def activity(self, name: str) -> dict[str, Any]:
        """What this process alone knows of a run; ``live``: generations by lease."""
        turns, forks = self._sessions.turns(name)
        return {
            "delivered": self._counters.delivered,
            "undelivered": self._counters.undelivered,
            "per_s": self.rate.per_s(),
            "generations": sum(session.running() for session in self._sessions.live(name)),
            "turns": turns,
            "forks": forks,
            "waits_for": self._writer.waits_for(name),
            "live": {route["lease"]: route["live"] for route in self._routes.describe(name)},
        }

    def _facts(self, name: str) -> dict[str, Any]:
        books = self._ledger.books(name)
        streams = self._ledger.streams(name)
        intervals = self._ledger.intervals(name)
        trained = [interval for interval in intervals if interval.kind == "train"]
        generated = [interval for interval in intervals if interval.kind == "generate"]
        return {
            "spec": self._ledger.run_info(name).spec,
            "journalled": self._journal.tokens().sampled,
            "noted": self._ledger.turns_of(name),
            "unwritten": self._ledger.unwritten(name) if TRAIN in streams else (0, 0),
            "sessions_in_flight": self._ledger.open_sessions(name),
            "proxies": [{"url": proxy.url, "lease_until": proxy.lease_until} for proxy in self._ledger.proxies()],
            "books": {**asdict(books), "balanced": books.balanced},
            "failures": [_failure(failure) for failure in self._ledger.failures(name)],
            "steps": [asdict(step) for step in self._ledger.steps(name)],
            "evaluations": self._evaluations(name, streams),
            "overlap_fraction": overlap_fraction(trained, generated),
        }

    def _evaluations(self, name: str, streams: Iterable[str]) -> list[dict[str, Any]]:
        evaluations = sorted(set(streams) - {TRAIN}, key=_age)
        return [{"stream": stream, **_rewards(self._ledger.samples(name, stream))} for stream in evaluations]


def session_view(session: Session) -> dict[str, Any]:
    """Turns with their outcomes, and the size of the tree."""
    tree = session.tree
    return {
        "session": session.id,
        "run": session.run,
        "sealed": session.sealed,
        "forks": session.forks(),
        "turns": [_turn(turn) for turn in session.turns],
        "tree": {
            "spans": len(tree.spans),
            "prompt_tokens": tree.tokens("prompt"),
            "completion_tokens": tree.tokens("completion"),
        },
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """A turn as people see it; what each choice made is under ``choices``, the first one's also beside it."""
    choices = [
        {
            "choice": choice.index,
            "generation": choice.generation,
            "status": choice.status,
            "finish_reason": choice.finish_reason,
            "fault": choice.fault,
            "completion_tokens": len(choice.recording.ids),
            "versions": choice.recording.version_runs(),
            "segments": [segment.to_json() for segment in choice.recording.segments],
        }
        for choice in turn.choices
    ]
    return {
        **choices[0],
        "turn": turn.index,
        "outcome": turn.outcome.value,
        "reason": turn.reason,
        "prompt_tokens": turn.prompt_tokens,
        "asked": turn.asked,
        "used": {
            **turn.used.to_json(),
            "truncated_sampling": turn.used.truncated,
            "shaped_sampling": turn.used.shaped,
            "greedy": turn.used.temperature == 0,
        },
        "choices": choices,
    }


def _failure(failure: Failure) -> dict[str, Any]:
    key = failure.key
    where = {"stream": key.stream, "ordinal": key.ordinal, "sample": key.sample, "attempt": failure.attempt}
    last = {**where, "session": failure.session, "detail": failure.detail}
    return {"cause": failure.cause, "attempts": failure.attempts, "last": last}


def _rewards(rows: list[SampleRow]) -> dict[str, Any]:
    rewards = [row.reward for row in rows if row.reward is not None and row.state is not State.FAILED]
    done = sum(row.state in _DONE for row in rows)
    return {"samples": len(rows), "done": done, "n": len(rewards), "mean": fmean(rewards) if rewards else None}


def _age(stream: str) -> tuple[int, str]:
    version = stream.rpartition("/")[2]
    return (int(version) if version.isdigit() else 0, stream)
