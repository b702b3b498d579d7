"""The owner of a generation: reads the engine, journals, then feeds whoever waits.

It runs in its own task, so a client that goes away, an engine that dies and a
weight update are events for it, not exceptions in a handler. A generation
goes on, on the same engine or another, from prompt plus tokens so far, with
the rest of its token budget, until it ends by itself or its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import orjson

from proxy.ids import new_id
from proxy.meter import Counters
from proxy.routes import RouteTable, RouteUse
from proxy.trajectory import replay
from proxy.trajectory.answer import Delta
from proxy.trajectory.policy import choice_seed, segment_seed
from proxy.trajectory.recording import Segment
from proxy.trajectory.replay import Entry
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Choice, Turn
from proxy.upstream import Upstream
from storage.errors import (
    CannotContinue,
    ContextLengthExceeded,
    DeadlineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
    RequestError,
    SeamlessFlowError,
)
from storage.journal import JournalRecord
from workers.engines.base import Chunk, Sampling, TokenIds, written

_PAUSES_S = (0.02, 0.1, 0.3, 1.0)
"""Between segments that brought no token."""
_PROTOCOL_ERRORS = 3
"""Broken answers in a row, without a token between them, after which the generation fails."""

_log = logging.getLogger(__name__)


class JournalWriter(Protocol):
    """Where the records of a session go: the journal, or its owner's pen."""

    async def append(self, *records: JournalRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What every generation needs of the process."""

    journal: JournalWriter
    routes: RouteTable
    counters: Counters


class Generation:
    """The owner of one choice; ``show`` is called with its new deltas and whether it is done.

    ``whole``: nobody reads the answer before its end, so its tokens need not be journalled piece by piece. A choice
    that is finished already is only shown again.
    """

    def __init__(
        self,
        services: Services,
        session: Session,
        turn: Turn,
        choice: Choice,
        show: Callable[[list[Delta], bool], None],
        *,
        whole: bool = False,
    ) -> None:
        self._services = services
        self._session = session
        self._show = show
        # What ends an answer here and not in the engine is looked for in every piece.
        self._whole = whole and not turn.used.stop and not turn.single_call
        self.turn = turn
        self.choice = choice
        self.error: Exception | None = None
        self.done = choice.status == "finished"
        self._leaving = False  # the last reader went away; it ends as soon as the engine lets go
        self._upstream: Upstream | None = None
        self._idle = False  # waiting for a route or for time to pass: nothing is lost by a cancellation
        self._builder = session.builder(turn)
        self._task: asyncio.Task[None] | None = None
        _, deltas = self._builder.feed(())
        for ids in choice.recording.portions():
            deltas += self._builder.feed(ids)[1]
        if self.done:
            deltas += self._builder.finish(ended=choice.finish_reason != "length")
        else:
            self._task = asyncio.create_task(self._run(), name=f"generation {choice.generation}")
        show(deltas, self.done)

    def stop(self) -> None:
        """Leave the engine; what was generated stays, and the choice can be continued."""
        if self.done:
            return
        self._leaving = True
        if self._upstream is not None:
            self._upstream.interrupt()
        elif self._idle and self._task is not None:
            self._task.cancel()

    async def gone(self) -> None:
        """Wait for the owner's end, however it ends."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:
            if not self._leaving:
                raise
        except SeamlessFlowError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001  # a defect of ours must reach the readers, or they wait for ever
            _log.exception("generation %s", self.choice.generation)
            await self._fail(error)
        finally:
            if self.choice.status == "open":
                self.choice.status = "aborted"
            if not self.done:
                self.done = True
                self._show([], True)

    async def _generate(self) -> None:
        recording, used = self.choice.recording, self.turn.used
        limit = self._session.policy.hold_limit_s
        progress, idle, broken = time.monotonic(), 0, 0
        problem = ""
        while not self._leaving:
            before = len(recording.ids)
            # The engine may have died between the end-of-turn token and its word that it ended there.
            ended = before > 0 and recording.ids[-1] in self._session.renderer.eos_ids
            if ended or before >= used.max_new_tokens:
                await self._end(ended=ended)
                return
            try:
                if await self._segment(used.max_new_tokens - before, progress + limit, problem):
                    return
            except EngineUnavailable as error:
                problem = str(error)
            except EngineProtocolError as error:
                problem, broken = str(error), broken + 1
                if broken > _PROTOCOL_ERRORS:
                    raise
            if len(recording.ids) > before:
                progress, idle, broken = time.monotonic(), 0, 0
                continue
            if problem:
                _log.warning("generation %s goes on elsewhere: %s", self.choice.generation, problem)
            if time.monotonic() - progress > limit:
                raise DeadlineError(f"{self._what()} got no token for {limit:g} s (pipeline.hold_limit_s): {problem}")
            with self._idly():
                await asyncio.sleep(_PAUSES_S[min(idle, len(_PAUSES_S) - 1)])
            idle += 1

    async def _segment(self, budget: int, deadline: float, problem: str) -> bool:
        """Generate on one engine until it stops; True when the generation is over."""
        what = self._what() + (f" (last problem: {problem})" if problem else "")
        with self._idly():
            use = await self._services.routes.acquire(
                self._session.run, self._session.affinity, deadline, what, version=self._session.policy.version
            )
        failed = False
        try:
            return await self._on_route(use, budget)
        except (EngineUnavailable, EngineProtocolError):
            failed = True
            raise
        except EngineRejected as error:
            raise _as_request_error(error) from error
        finally:
            self._services.routes.release(use, suspect=failed)

    async def _on_route(self, use: RouteUse, budget: int) -> bool:
        recording, route = self.choice.recording, use.route
        start, number = len(recording.ids), len(recording.segments)
        rid = new_id()
        seed = segment_seed(choice_seed(self.turn.used.seed, self.choice.index), number)
        sampling = self._sampling(budget, seed)
        if start and not use.engine.continuable(sampling):
            raise CannotContinue(
                f"{self._what()} was cut after {start} tokens, and what it asks of sampling cannot go on elsewhere"
            )
        segment = Segment(
            number, route.node, route.lease, route.engine_kind, rid, route.epoch, route.version, seed, start, start
        )
        end = self.turn.prompt_end
        prompt: TokenIds = written(self._session.tree.path_ids(end), self._session.tree.path_json(end))
        if start:
            prompt = np.concatenate([np.asarray(prompt), np.asarray(recording.ids, np.int32)])
        self._session.affinity = route.lease
        upstream = Upstream(use.engine, prompt, sampling, request_id=rid, salt=f"wv:{route.version}")
        self._upstream = upstream
        use.on_cut = upstream.interrupt
        try:
            while (chunk := await upstream.read()) is not None:
                if await self._take(chunk, segment):
                    return True
            return False
        finally:
            self._upstream = None
            await upstream.close()

    def _sampling(self, budget: int, seed: int | None) -> Sampling:
        """Stop strings are not among it: they are found here, since an engine cannot see one that straddles a cut."""
        used = self.turn.used
        return Sampling(
            budget,
            used.temperature,
            used.top_p,
            used.top_k,
            stop_token_ids=tuple(sorted(self._session.renderer.eos_ids)),
            seed=seed,
            presence_penalty=used.presence_penalty,
            frequency_penalty=used.frequency_penalty,
            logit_bias=used.logit_bias,
            json_schema=None if used.json_schema is None else orjson.dumps(used.json_schema).decode(),
            top_logprobs=used.top_logprobs,
            whole=self._whole,
        )

    async def _take(self, chunk: Chunk, segment: Segment) -> bool:
        """Journal a chunk, then show it; True when the generation is over."""
        turn, choice, recording = self.turn, self.choice, self.choice.recording
        entries: list[Entry] = []
        if not recording.segments or recording.segments[-1] is not segment:
            recording.begin(segment)
            entries.append(replay.segment_entry(turn, choice, segment))
        accepted, deltas = self._builder.feed(chunk.ids)
        self._services.counters.undelivered += len(chunk.ids) - accepted
        ids, logprobs = chunk.ids[:accepted], chunk.logprobs[:accepted]
        marks = recording.marks(accepted, chunk.version)
        tops = [[[token, value] for token, value in top] for top in chunk.tops[:accepted]]
        if ids:
            entries.append(replay.tokens_entry(turn, choice, ids, logprobs, marks, tops))
        spans = [[span.version, span.start, span.end] for span in chunk.spans or ()]
        if spans:
            entries.append(replay.spans_entry(turn, choice, spans))
        stopped = self._builder.over
        finish = chunk.finish
        over = stopped or (finish is not None and finish.kind != "abort")
        ended = stopped or (finish is not None and finish.kind == "stop")
        if over:
            entries.append(replay.end_entry(turn, choice, ended=ended))
        await self._save(entries)
        recording.add(ids, logprobs, marks, tops)
        if spans:
            recording.amend(spans)
        if over:
            deltas += self._session.complete(turn, choice, self._builder, ended=ended)
            self.done = True
        self._services.counters.delivered += len(ids)
        if deltas or over:
            self._show(deltas, over)
        if over and finish is None and self._upstream is not None:
            self._upstream.interrupt()
        return over

    async def _end(self, *, ended: bool) -> None:
        """Over without another token from an engine."""
        await self._save([replay.end_entry(self.turn, self.choice, ended=ended)])
        deltas = self._session.complete(self.turn, self.choice, self._builder, ended=ended)
        self.done = True
        self._show(deltas, True)

    async def _fail(self, error: Exception) -> None:
        self.error = error
        self.choice.status, self.choice.fault = "failed", f"{type(error).__name__}: {error}"
        self.choice.infra = not isinstance(error, RequestError | EngineRejected)
        try:
            await self._save([replay.fail_entry(self.turn, self.choice)])
        except SeamlessFlowError as second:
            _log.error("generation %s: its failure is not in the journal: %s", self.choice.generation, second)

    async def _save(self, entries: list[Entry]) -> None:
        if entries:
            await self._services.journal.append(*journal_records(self._session.id, entries))

    @contextlib.contextmanager
    def _idly(self) -> Iterator[None]:
        """A wait that :meth:`stop` may break off."""
        self._idle = True
        try:
            yield
        finally:
            self._idle = False

    def _what(self) -> str:
        return f"turn {self.turn.index} of session {self._session.id}"


def journal_records(session: str, entries: Iterable[Entry]) -> list[JournalRecord]:
    """Entries of a session as records of the journal."""
    return [JournalRecord(session, entry.kind, entry.data, entry.ids, entry.logprobs) for entry in entries]


_TOO_LONG = re.compile(r"(exceeds?|longer than) the (model's )?(maximum )?context|input .* is longer than")


def _as_request_error(error: EngineRejected) -> SeamlessFlowError:
    """What engines say about too long a prompt, in the error that agents know."""
    if _TOO_LONG.search(str(error)):
        return ContextLengthExceeded(str(error), param="messages")
    return error
