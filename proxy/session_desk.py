"""Sessions as whoever runs an agent sees them: open one, end it, reward it, look at it."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from proxy.runs import Runs
from proxy.samples import SampleDesk
from proxy.sessions import NewSession, Sessions
from proxy.status import session_view
from proxy.trajectory.policy import Limits, Policy, derive_seed
from storage.errors import InvalidRequest, SessionClosed
from storage.ledger import Ledger, SessionRecord

CLOSED = "closed"
"""State of a session outside the sample queue that has ended."""


class SessionDesk:
    """Methods are the control API's endpoints. For a session of a sample they speak to the sample."""

    def __init__(self, ledger: Ledger, runs: Runs, sessions: Sessions, samples: SampleDesk) -> None:
        self._ledger = ledger
        self._runs = runs
        self._sessions = sessions
        self._samples = samples
        self._making: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def create(
        self, run: str, limits: Limits, parent: str | None, label: str | None, secret: bytes | None = None
    ) -> NewSession:
        """A session outside the sample queue; asked for again with the same ``secret`` it is the one it was.

        With a ``parent`` it has that one's policy and what is left of its time, and ends with it: a sub-agent whose
        turns shall not be trained with its agent's. Raises SessionClosed if the parent has ended.
        """
        async with self._making.setdefault(secret or secrets.token_bytes(32), asyncio.Lock()):
            if parent is None:
                return await self._open((await self._runs.get(run)).policy(), run, limits, None, label, secret)
            owner = await self._sessions.get(parent)
            async with owner.sealing:
                if owner.record.run != run:
                    raise InvalidRequest(f"parent {parent} is a session of run {owner.record.run!r}", param="parent")
                if owner.ended:
                    raise SessionClosed(f"session {parent} has ended: nothing is opened on its behalf any more")
                policy = _of_child(owner.session.policy, len(owner.children))
                new = await self._open(policy, run, limits, parent, label, secret)
                if new.session not in owner.children:
                    owner.children.append(new.session)
                return new

    async def _open(
        self, policy: Policy, run: str, limits: Limits, parent: str | None, label: str | None, secret: bytes | None
    ) -> NewSession:
        policy = policy.tightened(limits, time.time())
        new, record = self._sessions.new(run, policy, parent=parent, label=label, secret=secret)
        if secret is None or not await asyncio.to_thread(self._ledger.session_by_key_hash, record.key_hash):
            await self._sessions.create([record])
        return new

    async def finish(self, session: str, output: Any) -> str:
        """Seal a session; returns what its sample is then, or ``closed`` if it has none."""
        record = await self._sessions.record(session)
        if record.key is not None:
            return await self._samples.finish(record.run, session, output)
        await self._sessions.end(session)
        return CLOSED

    async def reward(self, session: str, reward: float | None, cause: str | None, detail: str) -> None:
        """Score the session's sample; for a session that has none note the reward, or why there is none, once."""
        record = await self._sessions.record(session)
        if record.key is None:
            why = None if cause is None else f"{cause}: {detail}"
            await asyncio.to_thread(self._ledger.reward_session, session, reward, why)
        elif reward is not None:
            await self._samples.score(record.run, session, reward)
        else:
            await self._samples.fail_score(record.run, session, cause or "", detail)

    async def inspect(self, session: str) -> dict[str, Any]:
        """Whose it is, its limits, children, turns and tree."""
        live = await self._sessions.get(session)
        record = await asyncio.to_thread(self._ledger.session, session)
        facts = await asyncio.to_thread(self._facts, record)
        return {**facts, "children": list(live.children), **session_view(live.session)}

    async def list(self, run: str, *, open_only: bool, after: str, limit: int) -> list[dict[str, Any]]:
        """Sessions of a run by id, those behind ``after``."""
        await self._runs.get(run)

        def rows() -> list[dict[str, Any]]:
            found = self._ledger.sessions_of(run, open_only=open_only, after=after, limit=limit)
            return [self._facts(record) for record in found]

        return await asyncio.to_thread(rows)

    def _facts(self, record: SessionRecord) -> dict[str, Any]:
        """What the ledger knows; the reward of a sample's attempt is the sample's, as long as it is the last one."""
        reward, cause, sample = record.reward, record.reward_cause, None
        if record.key is not None:
            row = self._ledger.sample(record.key)
            last = row.attempt == record.attempt
            reward, cause = (row.reward, row.cause) if last else (None, None)
            sample = {"stream": record.key.stream, "ordinal": record.key.ordinal, "sample": record.key.sample}
            sample |= {"attempt": record.attempt, "state": row.state.value if last else "replaced"}
        policy = Policy.from_json(dict(record.policy))
        return {
            "session": record.session,
            "run": record.run,
            "label": record.label,
            "parent": record.parent,
            "sample": sample,
            "created": record.created,
            "ended": record.ended,
            "closed": record.closed,
            "collected": record.collected,
            "reward": reward,
            "cause": cause,
            "limits": {name: getattr(policy, name) for name in ("max_turns", "max_session_tokens", "expires")},
        }


def _of_child(policy: Policy, number: int) -> Policy:
    seed = policy.seed
    return replace(policy, seed=None if seed is None else derive_seed(seed, "child", number))
