"""The streaming data loader's desk: samples out to agents, results and rewards in."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.dialects.chat import response_message
from proxy.live_session import LiveSession
from proxy.runs import Run, Runs
from proxy.sessions import Sessions
from proxy.shard_writer import ShardWriter
from proxy.trajectory.canonical import Message
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Choice, Turn
from storage.errors import InvalidRequest, NotFoundError
from storage.ledger import TRAIN, Ledger, SampleKey, SessionRecord, State

INFRA = "infra"
"""Cause of attempts that infrastructure ended: they are repeated and never become a reward."""
NO_TURNS = "no_turns"
"""Cause of a session that asked the model nothing: no trace, no reward."""
_SCORE_LEASE_SLACK_S = 60.0


class SampleDesk:
    """Methods are the control API's endpoints; each is safe to repeat."""

    def __init__(self, ledger: Ledger, runs: Runs, sessions: Sessions, writer: ShardWriter) -> None:
        self._ledger = ledger
        self._runs = runs
        self._sessions = sessions
        self._writer = writer

    async def claim(
        self, name: str, stream: str, worker: str, limit: int, holding: list[str] | None
    ) -> list[dict[str, Any]]:
        """Start samples.

        ``holding``: the sessions the worker has. Others of its running samples
        are given back, since the answer that carried them was lost. Nothing to
        train on starts while too much waits for the object store.
        """
        run = await self._runs.get(name)
        self._sessions.require_lease()
        if holding is not None:
            await self._give_back_lost(run, stream, worker, set(holding))
        try:
            if stream == TRAIN and await self._writer.full(name):
                return []
            claims = await asyncio.to_thread(self._ledger.claim_samples, name, stream, worker, limit)
        except NotFoundError:
            return []  # a stream without admission lets nothing start
        made = [
            self._sessions.new(name, run.policy(claim.key), key=claim.key, attempt=claim.attempt) for claim in claims
        ]
        if made:
            await self._sessions.create([record for _, record in made])
        return [
            {
                "ordinal": claim.key.ordinal,
                "sample": claim.key.sample,
                "attempt": claim.attempt,
                "session": new.session,
                "api_key": new.api_key,
                "base_url": new.base_url,
                "model": new.model,
            }
            for claim, (new, _) in zip(claims, made, strict=True)
        ]

    async def finish(self, name: str, session: str, output: Any) -> str:
        """Seal the session; its sample is finished, or tried again if infrastructure failed it unseen."""
        live, key = await self._sample_session(name, session)
        sealed = await self._sessions.seal(live)
        if live.fault:
            return await self._fail(live.record, key, INFRA, live.fault, retry=True)
        if not any(choice.recording.ids for _, choice in sealed.generations()):
            detail = "the agent ended without an answer from the model"
            return await self._fail(live.record, key, NO_TURNS, detail, retry=False)
        await asyncio.to_thread(self._finish, key, live.record.attempt, sealed, output)
        return State.FINISHED.value

    async def fail(self, name: str, session: str, cause: str, detail: str, *, retry: bool) -> str:
        """Seal the session; its sample failed. A fault of infrastructure outweighs what the agent made of it."""
        live, key = await self._sample_session(name, session)
        await self._sessions.seal(live)
        fault = live.fault or ("the proxy restarted under this session" if live.interrupted else "")
        if fault:
            return await self._fail(live.record, key, INFRA, f"{fault} ({cause}: {detail})", retry=True)
        return await self._fail(live.record, key, cause, detail, retry=retry)

    async def release(self, name: str, stream: str, worker: str) -> None:
        """The worker restarted: what it was running is tried again."""
        run = await self._runs.get(name)
        attempts = run.spec.agent.max_attempts
        released = await asyncio.to_thread(self._ledger.release_worker, name, stream, worker, max_attempts=attempts)
        for sample in released:
            if sample.session is not None:
                await self._sessions.end(sample.session)
        self._writer.kick(name)

    async def claim_scores(self, name: str, worker: str, limit: int) -> list[dict[str, Any]]:
        """Finished samples with their transcripts."""
        run = await self._runs.get(name)
        lease_s = run.spec.reward.time_limit_s + _SCORE_LEASE_SLACK_S
        claims = await asyncio.to_thread(self._ledger.claim_scores, name, worker, limit, lease_s)
        answers = []
        for claim in claims:
            live = await self._sessions.get(claim.session)
            answers.append(
                {
                    "ordinal": claim.key.ordinal,
                    "sample": claim.key.sample,
                    "attempt": claim.attempt,
                    "stream": claim.key.stream,
                    "session": claim.session,
                    "output": claim.output,
                    "transcript": transcript(live.session),
                }
            )
        return answers

    async def score(self, name: str, session: str, reward: float) -> None:
        """A reward; the last one of a group makes its shard."""
        record, key = await self._sample_record(name, session)
        await asyncio.to_thread(self._ledger.score_sample, key, record.attempt, reward)
        if key.stream == TRAIN:
            self._writer.kick(name)
        else:
            self._sessions.forget(session)

    async def fail_score(self, name: str, session: str, cause: str, detail: str) -> None:
        """A reward that is missing; it never becomes zero."""
        record, key = await self._sample_record(name, session)
        await self._fail(record, key, cause, detail, retry=False)

    async def _sample_session(self, name: str, session: str) -> tuple[LiveSession, SampleKey]:
        live = await self._sessions.get(session)
        _, key = await self._sample_record(name, session)
        return live, key

    async def _sample_record(self, name: str, session: str) -> tuple[SessionRecord, SampleKey]:
        record = await self._sessions.record(session)
        if record.run != name or record.key is None:
            raise InvalidRequest(f"session {session} is not of a sample of run {name!r}", param="session")
        return record, record.key

    def _finish(self, key: SampleKey, attempt: int, sealed: Session, output: Any) -> None:
        known = list(sealed.versions())
        self._ledger.finish_sample(
            key,
            attempt,
            session=sealed.id,
            prompt_tokens=sealed.tree.tokens("prompt"),
            completion_tokens=sealed.tree.tokens("completion"),
            turns=len(sealed.turns),
            min_version=min(known, default=None),
            max_version=max(known, default=None),
            output=output,
        )

    async def _fail(self, record: SessionRecord, key: SampleKey, cause: str, detail: str, *, retry: bool) -> str:
        run = await self._runs.get(record.run)
        attempts = run.spec.agent.max_attempts
        following = await asyncio.to_thread(
            self._ledger.fail_sample,
            key,
            record.attempt,
            cause,
            detail,
            retry=retry,
            max_attempts=attempts,
        )
        self._sessions.forget(record.session)
        self._writer.kick(record.run)
        return State.FAILED.value if following is None else State.QUEUED.value

    async def _give_back_lost(self, run: Run, stream: str, worker: str, holding: set[str]) -> None:
        rows = await asyncio.to_thread(self._ledger.samples, run.name, stream, state=State.RUNNING)
        records = await asyncio.to_thread(self._ledger.sessions_of, run.name, open_only=True)
        by_attempt = {(record.key, record.attempt): record.session for record in records}
        for row in rows:
            session = by_attempt.get((row.key, row.attempt))
            if row.worker != worker or session in holding:
                continue
            detail = "the answer that handed it out was lost"
            attempts = run.spec.agent.max_attempts
            await asyncio.to_thread(
                self._ledger.fail_sample, row.key, row.attempt, INFRA, detail, retry=True, max_attempts=attempts
            )
            if session is not None:
                await self._sessions.end(session)


def transcript(session: Session) -> list[dict[str, Any]]:
    """What the agent sent and got, choice by choice, in OpenAI's chat format."""
    return [
        _exchange(session, turn, choice, choice.answer)
        for turn, choice in session.generations()
        if choice.answer is not None
    ]


def _exchange(session: Session, turn: Turn, choice: Choice, answer: Message) -> dict[str, Any]:
    messages = [message.for_chat() for message in session.conversations.messages(turn)]
    return {
        "request": {"messages": messages, **({"tools": list(turn.tools)} if turn.tools else {})},
        "response": {
            "message": response_message(answer, choice.generation),
            "finish_reason": choice.finish_reason,
        },
    }
