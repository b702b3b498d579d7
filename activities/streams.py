"""The streaming data loader as two long activities: ``stream_tasks`` runs agents, ``stream_rewards`` scores them.

Both run until they are cancelled, and hold nothing that is not in the ledger: a lost attempt's samples are given back
when the next attempt starts under the same worker slot. What is claimed next is the ledger's decision; these loops
only ask again when a session has ended, or after ``IDLE_S``. Sessions that end within ``GATHER_S`` are replaced by one
request: each costs the proxy more than the agent's own turn does.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from temporalio import activity
from temporalio.exceptions import ApplicationError

from proxy.client import ClaimedSample, ClaimedScore, ControlClient
from storage.books.records import END_OF_DATA
from storage.errors import ConfigError, DeadlineError, FencedError, NotFoundError, SeamlessFlowError, SessionClosed
from workers.agents.data import Tasks, source_for
from workers.agents.outcome import Outcome, Runner
from workers.agents.runners import agent_runner, reward_runner
from workflows.messages import StreamInput
from workflows.spec import RunSpec

log = logging.getLogger(__name__)

IDLE_S = 0.1
GATHER_S = 0.02
BEAT_S = 1.0
CLAIM_LIMIT = 8
"""Samples that are claimed at once: the first of many begin while the others are still being opened."""
SCORES_AT_A_TIME = 64
REWARD_TRIES = 3
RELEASE_LIMIT_S = 5.0

SAMPLE_CAUSES = {"error": "agent_error", "timeout": "agent_timeout", "infra": "infra", "end": END_OF_DATA}
SCORE_CAUSES = {
    "error": "reward_error",
    "infra": "reward_error",
    "timeout": "reward_timeout",
    "missing": "reward_missing",
    "invalid": "reward_invalid",
}


class StreamActivities:
    """Activities of an agent or reward worker; they reach the ledger through the proxy's control API only."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client

    @activity.defn(name="stream_tasks")
    async def stream_tasks(self, given: StreamInput) -> None:
        """Run one agent session per claimed sample of a stream, until cancelled.

        A run whose agent or data cannot be loaded fails with a non-retryable ``ConfigError``.
        """
        try:
            spec = await self._spec(given.run)
            stream = TaskStream(self._client, agent_runner(spec), source_for(spec, given.stream), spec, given)
            await _beating(stream)
        except* ConfigError as problems:
            _give_up(problems)

    @activity.defn(name="stream_rewards")
    async def stream_rewards(self, given: StreamInput) -> None:
        """Score the finished sessions of a run, of all its streams, until cancelled."""
        try:
            spec = await self._spec(given.run)
            await _beating(RewardStream(self._client, reward_runner(spec), spec, given))
        except* ConfigError as problems:
            _give_up(problems)

    async def _spec(self, run: str) -> RunSpec:
        return RunSpec.model_validate((await self._client.run_status(run))["spec"])


class Stream(ABC):
    """A loop that claims work, runs each piece as a task of its own, and claims again as soon as one ends."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._ended = asyncio.Event()
        self.running = 0
        self.done = 0

    async def run(self) -> NoReturn:
        """Work until cancelled; an error of the set-up ends all of it. The runner is closed on the way out."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._ended.clear()
                    if not await self._claimed(group):
                        await self._pause()
        finally:
            await self._runner.close()

    async def _claimed(self, group: asyncio.TaskGroup) -> bool:
        """A proxy that is away for longer than the client waits costs no piece of work that runs."""
        try:
            return await self._claim(lambda work: self._start(group, work))
        except DeadlineError as error:
            log.warning("nothing was claimed: %s", error)
            return False

    @abstractmethod
    async def _claim(self, start: Callable[[Coroutine[Any, Any, None]], None]) -> bool:
        """Claim what may run now and start it; whether there may be more at once."""

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        self.running += 1
        group.create_task(self._count(work))

    async def _count(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self.running -= 1
            self.done += 1
            self._ended.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(IDLE_S):
                await self._ended.wait()
                await asyncio.sleep(GATHER_S)
        except TimeoutError:
            pass


class TaskStream(Stream):
    """Runs the samples of one stream; each is finished or failed once, and a stale attempt's report is dropped."""

    def __init__(self, client: ControlClient, runner: Runner, source: Tasks, spec: RunSpec, given: StreamInput) -> None:
        super().__init__(runner)
        self._client = client
        self._source = source
        self._limit_s = spec.agent.time_limit_s
        self._given = given
        self._holding: set[str] = set()

    async def run(self) -> NoReturn:
        await self._release()
        try:
            await super().run()
        finally:
            try:
                async with asyncio.timeout(RELEASE_LIMIT_S):
                    await self._release()
            except (TimeoutError, DeadlineError):
                log.warning("run %s: the proxy is away; samples are given back by the next attempt", self._given.run)

    async def _claim(self, start: Callable[[Coroutine[Any, Any, None]], None]) -> bool:
        given = self._given
        claims = await self._client.claim_samples(
            given.run, given.stream, given.worker_slot, CLAIM_LIMIT, holding=self._holding
        )
        for claim in claims:
            self._holding.add(claim.session)
            start(self._session(claim))
        return len(claims) == CLAIM_LIMIT

    async def _session(self, claim: ClaimedSample) -> None:
        try:
            await self._run_and_report(claim)
        finally:
            self._holding.discard(claim.session)

    async def _run_and_report(self, claim: ClaimedSample) -> None:
        outcome = await self._run_agent(claim)
        run = self._given.run
        if outcome.status == "ok":
            report = self._client.finish_sample(run, claim.session, outcome.value)
        else:
            cause, retry = SAMPLE_CAUSES[outcome.status], outcome.status == "infra"
            log.warning("run %s, session %s: %s: %s", run, claim.session, cause, _last_line(outcome.detail))
            report = self._client.fail_sample(run, claim.session, cause, outcome.detail, retry=retry)
        await _unless_stale(report, run, claim.session)

    async def _run_agent(self, claim: ClaimedSample) -> Outcome:
        llm = {"base_url": claim.base_url, "api_key": claim.api_key, "model": claim.model}
        try:
            task = self._source.task(claim.ordinal)
        except NotFoundError as error:
            return Outcome("end", detail=str(error))
        payload = {"task": task, "llm": llm}
        return await self._runner.run(claim.session, payload, self._limit_s)

    async def _release(self) -> None:
        await self._client.release_worker(self._given.run, self._given.stream, self._given.worker_slot)


class RewardStream(Stream):
    """Scores finished samples; a reward that is no finite number is missing, with its cause, and never zero."""

    def __init__(self, client: ControlClient, runner: Runner, spec: RunSpec, given: StreamInput) -> None:
        super().__init__(runner)
        self._client = client
        self._spec = spec
        self._given = given
        self._sources: dict[str, Tasks] = {}

    async def _claim(self, start: Callable[[Coroutine[Any, Any, None]], None]) -> bool:
        free = SCORES_AT_A_TIME - self.running
        if free <= 0:
            return False
        claims = await self._client.claim_scores(self._given.run, self._given.worker_slot, free)
        for claim in claims:
            start(self._score(claim))
        return len(claims) == free

    async def _score(self, claim: ClaimedScore) -> None:
        outcome = await self._run_reward(claim)
        run = self._given.run
        if outcome.status == "ok":
            report = self._client.commit_score(run, claim.session, outcome.value)
        else:
            cause = SCORE_CAUSES[outcome.status]
            log.warning("run %s, session %s: %s: %s", run, claim.session, cause, _last_line(outcome.detail))
            report = self._client.fail_score(run, claim.session, cause, outcome.detail)
        await _unless_stale(report, run, claim.session)

    async def _run_reward(self, claim: ClaimedScore) -> Outcome:
        """A reward whose process was lost to a neighbour is called again, a few times."""
        payload = {"task": self._task(claim), "output": claim.output, "turns": claim.transcript}
        for _ in range(REWARD_TRIES):
            outcome = await self._runner.run(claim.session, payload, self._spec.reward.time_limit_s)
            if outcome.status != "infra":
                break
        return outcome

    def _task(self, claim: ClaimedScore) -> dict[str, Any]:
        if claim.stream not in self._sources:
            self._sources[claim.stream] = source_for(self._spec, claim.stream)
        return self._sources[claim.stream].task(claim.ordinal)


async def _unless_stale(report: Awaitable[object], run: str, session: str) -> None:
    """Await a report; what it speaks of may have been given to another attempt meanwhile, which then speaks for it."""
    try:
        await report
    except (FencedError, NotFoundError, SessionClosed) as error:
        log.info("run %s, session %s: report dropped: %s", run, session, error)
    except DeadlineError as error:  # this one is lost and tried again, the others go on
        log.warning("run %s, session %s: report lost: %s", run, session, error)


def _last_line(detail: str) -> str:
    return detail.rstrip().rpartition("\n")[2]


async def _beating(stream: Stream) -> None:
    """Run the stream under a heartbeat; its cancellation arrives with one."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_beat(stream))
        await stream.run()


async def _beat(stream: Stream) -> NoReturn:
    while True:
        activity.heartbeat({"running": stream.running, "done": stream.done})
        await asyncio.sleep(BEAT_S)


def _give_up(problems: BaseExceptionGroup[ConfigError]) -> NoReturn:
    """A mistake of the user's: shown in the run's failure, never retried."""
    messages = sorted({str(problem) for problem in _leaves(problems)})
    raise ApplicationError("\n".join(messages), type="ConfigError", non_retryable=True) from None


def _leaves(group: BaseExceptionGroup[SeamlessFlowError]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
