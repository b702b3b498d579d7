"""One measurement: the same conversations sent through every contestant in turn, round after round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.proxy.client import Reply, call, drive
from benchmarks.proxy.contestants import Contestant, Session
from benchmarks.proxy.statistics import median, percentile
from benchmarks.proxy.traffic import Conversation, Shape, conversations


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is sent in one round: ``turns`` of ``sessions`` conversations are measured, those before them are not."""

    name: str
    shape: Shape
    turns: range
    sessions: int
    concurrency: int
    rounds: int
    step_ms: float = 0.0
    """The engine's pace; 0: as fast as its events are taken."""
    siblings_first: bool = False
    """The first session of each group is not measured: it warms the others."""
    recorders_only: bool = False
    """To those that record nothing every request is the same: measured in another scenario."""


@dataclass(slots=True)
class Result:
    """Of one contestant in one scenario, over all rounds."""

    cpu_ms: list[float] = field(default_factory=list)
    """CPU per request, one figure a round."""
    rate: list[float] = field(default_factory=list)
    """Requests a second, one figure a round."""
    first_ms: list[float] = field(default_factory=list)
    """Time to first text of each request."""
    total_ms: list[float] = field(default_factory=list)

    def cpu(self) -> float:
        return median(self.cpu_ms)

    def added(self, direct: Result, share: float) -> float:
        """Latency added to ``direct``'s at a percentile."""
        return percentile(self.total_ms, share) - percentile(direct.total_ms, share)

    def first_added(self, direct: Result, share: float = 0.5) -> float:
        """Time to first text added to ``direct``'s at a percentile."""
        return percentile(self.first_ms, share) - percentile(direct.first_ms, share)


async def run_round(
    scenario: Scenario,
    contestants: Sequence[Contestant],
    engine: str,
    answers: dict[str, str],
    seed: int,
    results: dict[str, Result],
) -> None:
    """One round, contestants in an order of its own; appends to ``results``. Raises ValueError for a wrong answer."""
    talks = list(conversations(scenario.shape, scenario.sessions, answers, seed))
    await call(engine, "/bench", {"answer": scenario.shape.answer, "step_ms": 0})
    order = list(contestants)
    Random(seed).shuffle(order)  # noqa: S311 - no secret
    for contestant in order:
        sessions = await contestant.sessions(len(talks))
        measured = await _prepare(scenario, contestant, talks, sessions)
        await call(engine, "/bench", {"answer": scenario.shape.answer, "step_ms": scenario.step_ms})
        used = await contestant.process.at_rest()
        replies, seconds = await drive(contestant.url, measured, scenario.concurrency)
        cpu_s = await contestant.process.at_rest() - used
        await call(engine, "/bench", {"answer": scenario.shape.answer, "step_ms": 0})
        _note(results[contestant.name], replies, seconds, cpu_s)
        check(replies, answers[scenario.shape.answer])
        await contestant.finish(sessions)


def check(replies: Sequence[Reply], answer: str) -> None:
    """Every answer must be the engine's, whole. Raises ValueError."""
    for reply in replies:
        if reply.text() != answer:
            raise ValueError(f"a wrong answer: {reply.text()[:200]!r} instead of {answer[:200]!r}")


async def _prepare(
    scenario: Scenario, contestant: Contestant, talks: Sequence[Conversation], sessions: Sequence[Session]
) -> list[list[bytes]]:
    """Send what is not measured to those who keep it; returns what is measured, by session."""
    warming: list[list[bytes]] = []
    measured: list[list[bytes]] = []
    for index, (talk, session) in enumerate(zip(talks, sessions, strict=True)):
        requests = [session.request(body) for body in talk.bodies(0, scenario.turns.stop)]
        if scenario.siblings_first and index % scenario.shape.group == 0:
            warming.append(requests)
            continue
        warming.append(requests[: scenario.turns.start])
        measured.append(requests[scenario.turns.start :])
    if contestant.records:
        await drive(contestant.url, [requests for requests in warming if requests], scenario.concurrency)
    return measured


def _note(result: Result, replies: Sequence[Reply], seconds: float, cpu_s: float) -> None:
    result.cpu_ms.append(1000 * cpu_s / len(replies))
    result.rate.append(len(replies) / seconds)
    result.first_ms += [1000 * reply.first_s for reply in replies]
    result.total_ms += [1000 * reply.total_s for reply in replies]
