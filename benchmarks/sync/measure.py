"""What weight updates cost the agents, from what they saw, what the proxy recorded and what the engine logged. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.proxy.statistics import percentile, table

HEAD = (
    "engine",
    "transfer",
    "running requests",
    "updates",
    "answers",
    "errors",
    "lost",
    "again",
    "pause to",
    "held p50",
)
UNITS = ("", "", "", "", "", "", "tokens", "tokens", "first token", "ms")


@dataclass(slots=True)
class Answer:
    """One streamed answer: built by an agent, completed from the proxy's journal, read by :func:`judge`.

    Times are of one clock, in seconds.
    """

    asked: int
    """Tokens: the model cannot stop before."""
    started: float
    times: list[float] = field(default_factory=list)
    """When each token arrived."""
    logprobs: list[float] = field(default_factory=list)
    """As the agent got them."""
    error: str = ""
    versions: list[int] = field(default_factory=list)
    """Of each token, as recorded."""
    recorded: list[float] = field(default_factory=list)
    """Log-probs in the journal."""
    logged: list[float] | None = None
    """Log-probs in the engine's own log of the tokens that the proxy read; None: it keeps none."""

    def lost(self) -> int:
        """Tokens that were asked for and did not arrive as they were recorded, and logged."""
        logs = [self.recorded] if self.logged is None else [self.recorded, self.logged]
        arrived = 0
        for position, got in enumerate(self.logprobs[: self.asked]):
            arrived += all(position < len(log) and abs(got - log[position]) < 1e-5 for log in logs)
        return self.asked - arrived


@dataclass(frozen=True, slots=True)
class Update:
    """One change of weights: ``held`` is when the route was, ``open`` when it served ``version``."""

    version: int
    held: float
    open: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, transfer and way of pausing; times in ms, medians over updates or over agents and updates."""

    engine: str
    transfer: str
    mode: str
    updates: int
    answers: int
    agent_errors: int
    tokens_lost: int
    tokens_again: int
    """Made by the engine beyond those recorded: they were cut off before the proxy had them. -1: it does not say."""
    pause_to_first_token_ms: float
    hold_ms_p50: float
    first_error: str = ""

    def figures(self) -> dict[str, Any]:
        names = ("pause_to_first_token_ms", "tokens_lost", "agent_errors", "hold_ms_p50")
        return {name: getattr(self, name) for name in names}


def judge(case: tuple[str, str, str], updates: Sequence[Update], answers: Sequence[Answer], made: int | None) -> Row:
    """Figures of one case (engine, transfer, mode); ``made``: tokens that the engine says it made."""
    firsts, holds = [], []
    for update in updates:
        first = [when for answer in answers if (when := _first(answer, update.version)) is not None]
        if first:
            firsts.append(1000 * (min(first) - update.held))
        holds += [1000 * hold for answer in answers if (hold := _hold(answer, update)) is not None]
    errors = [answer.error for answer in answers if answer.error]
    recorded = sum(len(answer.recorded) for answer in answers)
    return Row(
        *case,
        updates=len(updates),
        answers=len(answers),
        agent_errors=len(errors),
        tokens_lost=sum(answer.lost() for answer in answers),
        tokens_again=-1 if made is None else made - recorded,
        pause_to_first_token_ms=round(percentile(firsts, 0.5), 1),
        hold_ms_p50=round(percentile(holds, 0.5), 1),
        first_error=errors[0] if errors else "",
    )


def _first(answer: Answer, version: int) -> float | None:
    """When an agent had its first token of ``version`` or a later one."""
    for when, made_by in zip(answer.times, answer.versions, strict=False):
        if made_by >= version:
            return when
    return None


def _hold(answer: Answer, update: Update) -> float | None:
    """How long an agent waited because of the update; None if it had no request then.

    That is the gap between its last token of older weights (or its request) and its first of the new ones.
    """
    if not answer.started < update.open:
        return None
    first = _first(answer, update.version)
    if first is None or first < update.held:
        return None
    before = [when for when, by in zip(answer.times, answer.versions, strict=False) if by < update.version]
    return first - (before[-1] if before else max(answer.started, update.held))


def print_table(rows: Sequence[Row]) -> str:
    """One line a case; ``again`` is blank where the engine does not say what it made."""
    lines = [
        (
            row.engine,
            row.transfer,
            row.mode,
            str(row.updates),
            str(row.answers),
            str(row.agent_errors),
            str(row.tokens_lost),
            "" if row.tokens_again < 0 else str(row.tokens_again),
            f"{row.pause_to_first_token_ms:.0f} ms",
            f"{row.hold_ms_p50:.0f}",
        )
        for row in rows
    ]
    errors = [f"{row.engine} {row.transfer} {row.mode}: {row.first_error}" for row in rows if row.first_error]
    return "\n".join([table(HEAD, [UNITS, *lines]), *errors])


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON line: a row for each engine and transfer; the other ways of pausing are keys of it."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        entry = found.setdefault((row.engine, row.transfer), {"engine": row.engine, "transfer": row.transfer})
        entry.update(row.figures() if row.mode == "in_place" else {row.mode: row.figures()})
    return {"bench": "sync", "rows": list(found.values())}


def by_request(log: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The log-probs of each request's tokens in an engine's token log."""
    made: dict[str, list[float]] = {}
    for line in log:
        made.setdefault(line["rid"], []).extend(line.get("logprobs", ()))
    return made
