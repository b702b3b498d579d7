"""What is to be rolled out: sessions drawn from distributions, or those of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from simulator.laws import AnyLaw, Array, Constant, Law
from simulator.sessions import Session

DRAWN = 64
"""Groups that are drawn for each simulated one, at most: to draw all of a very large step takes longer than to simulate
it, and its slowest group is hardly slower than that of so many."""
TOKEN_S = 0.01
"""Seconds of a token, as far as it matters for which of two sessions takes longer."""


class RecordedSession(BaseModel):
    """A session of a real run without its words: counts of tokens, and seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: int = Field(ge=0)
    answers: tuple[int, ...] = Field(min_length=1)
    observations: tuple[int, ...] = ()
    tools_s: tuple[float, ...] = ()
    reset_s: float = 0.0
    """From the sample's start to its first request."""
    reward_s: float = 0.0
    """From its last answer to its reward."""


class Workload(BaseModel):
    """Sessions by distribution. Every value is per sample; lengths are tokens.

    The same seed gives the same sessions to every pipeline and cluster: what differs between two simulations is what
    was changed, not luck.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompt: AnyLaw
    """Tokens of the first request."""
    answer: AnyLaw
    """Tokens that the model writes in a turn."""
    turns: AnyLaw = Constant(value=1)
    """Requests of a session."""
    observation: AnyLaw = Constant(value=0)
    """New prompt tokens of each request behind the first."""
    tool_s: AnyLaw = Constant(value=0)
    """Seconds between an answer and the next request."""
    reset_s: AnyLaw = Constant(value=0)
    """Seconds from a sample's start to its first request."""
    reward_s: AnyLaw = Constant(value=0)
    """Seconds from the last answer to the reward."""
    reset_fails: float = Field(default=0, ge=0, le=1)
    """Share of the samples whose environment is slow to start."""
    reset_fails_s: float = Field(default=0, ge=0)
    """How much longer those take."""
    context_cap: float = Field(default=float("inf"), gt=0)
    """A session ends where its conversation reaches this."""
    icc: float = Field(default=0.0, ge=0, le=1)
    """Share of the variance of log lengths that lies between tasks; the rest is between samples of a task."""
    drift_per_100_steps: float = Field(default=1.0, gt=0)
    """Factor by which answers have grown after 100 steps."""
    recorded: tuple[tuple[RecordedSession, ...], ...] = ()
    """Groups of a recorded run, in place of all distributions; repeated when they are used up."""

    def sessions(self, seed: int, groups_per_step: int, group_size: int, stands_for: int = 1) -> Sessions:
        """All sessions there will be, by ordinal."""
        return Sessions(self, seed, groups_per_step, group_size, stands_for)

    def live_context(self, scale: float = 1.0) -> float:
        """Mean tokens in the KV of a running session: what an engine reserves for one."""
        if self.recorded:
            flat = [session for group in self.recorded for session in group]
            written = np.array([sum(s.answers) + sum(s.observations) for s in flat], dtype=float)
            return float(np.mean([s.prompt for s in flat]) + (written**2).sum() / max(1.0, 2 * written.sum()))
        turns = self.turns.mean()
        if turns <= 1:
            return self.prompt.mean() + self.answer.mean(2, scale) / (2 * self.answer.mean(1, scale))
        length = turns * (self.answer.mean(1, scale) + self.observation.mean())
        spread = self.turns.mean(2) / turns**2
        return min(self.context_cap, self.prompt.mean() + length * spread / 2)


class Sessions:
    """Draws sessions a step's worth at a time; a step's are a function of seed and step alone."""

    def __init__(self, workload: Workload, seed: int, groups: int, size: int, stands_for: int) -> None:
        self._workload = workload
        self._seed = seed
        self._groups = groups
        self._size = size
        self._stands_for = stands_for
        self._blocks: dict[int, list[list[Session]]] = {}

    def group(self, ordinal: int) -> list[Session]:
        """The samples of one task; each group can be asked for once."""
        block, row = divmod(ordinal, self._groups)
        if block not in self._blocks:
            self._blocks[block] = self._recorded(block) if self._workload.recorded else self._drawn(block)
        group = self._blocks[block][row]
        if row == self._groups - 1:
            del self._blocks[block]
        return group

    def _recorded(self, block: int) -> list[list[Session]]:
        known = self._workload.recorded
        first = block * self._groups
        return [
            [_again(ordinal, index, s) for index, s in enumerate(known[ordinal % len(known)])]
            for ordinal in range(first, first + self._groups)
        ]

    def _drawn(self, block: int) -> list[list[Session]]:
        load = self._workload
        chance = np.random.default_rng((self._seed, block))
        drawn = _Drawn(load, chance, (self._groups * min(self._stands_for, DRAWN), self._size), block)
        rows = drawn.representatives(self._groups)
        first = block * self._groups
        return [
            [Session(first + number, i, **drawn.session(row, i)) for i in range(self._size)]
            for number, row in enumerate(rows)
        ]


class _Drawn:
    """All sessions of one step as arrays; shape of most: (groups, samples)."""

    def __init__(self, load: Workload, chance: np.random.Generator, shape: tuple[int, int], block: int) -> None:
        self._load = load
        self._size = shape[1]
        scale = load.drift_per_100_steps ** (block / 100)
        normal = _with_icc(chance, shape, load.icc)
        self._prompt = np.rint(_draw(load.prompt, chance, shape[0]))
        self._reset = _draw(load.reset_s, chance, shape)
        if load.reset_fails:
            self._reset += load.reset_fails_s * (chance.random(shape) < load.reset_fails)
        self._reward = _draw(load.reward_s, chance, shape)
        turns = load.turns.at(normal) if load.turns.mean() > 1 else np.ones(shape)
        self._counts = np.maximum(1, np.rint(turns)).astype(int)
        self._ends = np.cumsum(self._counts)
        total = int(self._ends[-1])
        lengths = chance.standard_normal(total) if load.turns.mean() > 1 else normal.ravel()
        self._answers = np.maximum(1, np.rint(load.answer.at(lengths, scale)))
        self._observations = np.rint(_draw(load.observation, chance, total))
        self._tools = _draw(load.tool_s, chance, total)

    def representatives(self, count: int) -> list[int]:
        """Rows that stand for all: groups ordered by how long they would take alone, the middle of each of ``count``
        equal parts, and of the last part its end, which is what a synchronous step waits for."""
        rows = len(self._counts)
        if rows == count:
            return list(range(rows))
        each = np.add.reduceat(self._answers * TOKEN_S + self._tools, self._ends - self._counts.ravel())
        alone = (each.reshape(self._counts.shape) + self._reset + self._reward).max(axis=1)
        part = rows // count
        places = np.arange(count) * part + part // 2
        places[-1] = rows - 1
        return sorted(np.argsort(alone, kind="stable")[places].tolist())

    def session(self, row: int, i: int) -> dict[str, Any]:
        """Its fields."""
        prompt = float(self._prompt[row])
        fields = {"prompt": prompt, "reset_s": float(self._reset[row, i]), "reward_s": float(self._reward[row, i])}
        count = int(self._counts[row, i])
        end = int(self._ends[row * self._size + i])
        if count == 1:
            return {**fields, "answers": [float(self._answers[end - 1])]}
        here = slice(end - count, end)
        turns = self._answers[here], self._observations[here], self._tools[here]
        return {**fields, **_capped(prompt, *turns, self._load.context_cap)}


def _draw(law: Law, chance: np.random.Generator, shape: int | tuple[int, int]) -> Array:
    if isinstance(law, Constant):
        return np.full(shape, law.value)
    return law.at(chance.standard_normal(shape))


def _with_icc(chance: np.random.Generator, shape: tuple[int, int], icc: float) -> Array:
    between = chance.standard_normal((shape[0], 1))
    return math.sqrt(icc) * between + math.sqrt(1 - icc) * chance.standard_normal(shape)


def _capped(prompt: float, answers: Array, observations: Array, tools: Array, cap: float) -> dict[str, Any]:
    """The turns up to the one in which the conversation reaches ``cap``, whose answer is cut there."""
    before = prompt + np.cumsum(answers + observations) - answers - observations
    count = max(1, int(np.searchsorted(before, cap - 1)))
    kept = answers[:count].tolist()
    kept[-1] = max(1.0, min(kept[-1], cap - float(before[count - 1])))
    between = count - 1
    return {"answers": kept, "observations": observations[:between].tolist(), "tools_s": tools[:between].tolist()}


def _again(ordinal: int, index: int, record: RecordedSession) -> Session:
    lists: Iterator[list[float]] = (list(v) for v in (record.answers, record.observations, record.tools_s))
    answers, observations, tools = lists
    return Session(
        ordinal, index, record.prompt, answers, observations, tools, reset_s=record.reset_s, reward_s=record.reward_s
    )
