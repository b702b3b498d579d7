"""Groups of agent sessions with random tokens, and the rows that three ways of training make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.trainer.packing import TokenColumns, WeightedTrajectory
from workers.trainer.rows import Segment, Trajectory

VOCABULARY = 1024


@dataclass(frozen=True)
class Case:
    """One group: ``siblings`` sessions of ``turns`` turns behind one prompt."""

    turns: int
    siblings: int
    opening: int
    """Tokens of the first prompt, which all share."""
    prompt: int
    """Tokens of each later prompt."""
    answer: int
    branches: bool = False
    """The siblings are branches of one session: each leaves the first at another turn, not at the first prompt."""

    @property
    def name(self) -> str:
        kind = "branches" if self.branches else "siblings"
        return f"{self.turns} turns, {self.siblings} {kind}" if self.siblings > 1 else f"{self.turns} turns"


@dataclass(frozen=True, eq=False)
class Turn:
    prompt: npt.NDArray[np.int32]
    answer: npt.NDArray[np.int32]
    engine_logprobs: npt.NDArray[np.float32]
    advantage: float
    first: int
    """Index of its first trained token in the group."""


class Group:
    """The turns of a case, along each leaf path."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._random, self._tokens = case, np.random.default_rng(seed), 0
        self._opening = self._ids(case.opening)
        main = self._turns(case.turns, float(self._random.standard_normal()))
        self.paths = [main]
        for n in range(1, case.siblings):
            kept = case.turns * n // case.siblings if case.branches else 0
            advantage = main[0].advantage if case.branches else float(self._random.standard_normal())
            self.paths.append(main[:kept] + self._turns(case.turns - kept, advantage, first=kept == 0))

    def leaf_rows(self) -> list[WeightedTrajectory]:
        """One row per leaf path; an answer on several is trained in the first."""
        seen: set[int] = set()
        rows = []
        for path in self.paths:
            new = [turn for turn in path if turn.first not in seen]
            seen.update(turn.first for turn in new)
            rows.append(self._row(path, new))
        return rows

    def turn_rows(self) -> list[WeightedTrajectory]:
        """One row per turn: all that its answer follows, and the answer; what most trainers do."""
        ends = {turn.first: path[: n + 1] for path in self.paths for n, turn in enumerate(path)}
        return [self._row(path, path[-1:]) for path in ends.values()]

    def _turns(self, count: int, advantage: float, *, first: bool = True) -> list[Turn]:
        turns = []
        for n in range(count):
            prompt = self._opening if first and n == 0 else self._ids(self._case.prompt)
            answer = self._ids(self._case.answer)
            logprobs = (-7 + 0.3 * self._random.standard_normal(len(answer))).astype(np.float32)
            turns.append(Turn(prompt, answer, logprobs, advantage, self._tokens))
            self._tokens += len(answer)
        return turns

    def _row(self, path: Sequence[Turn], trained: Sequence[Turn]) -> WeightedTrajectory:
        segments = []
        for turn in path:
            each = np.arange(len(turn.answer) if turn in trained else 0, dtype=np.int32)
            logprobs = turn.engine_logprobs[: len(each)]
            segments += [Segment((0, 0), turn.prompt, each[:0], logprobs[:0], each[:0])]
            segments += [Segment((0, 0), turn.answer, each, logprobs, np.zeros_like(each))]
        count = sum(len(turn.answer) for turn in trained)
        columns = TokenColumns(
            token_N=np.concatenate([np.arange(len(turn.answer)) + turn.first for turn in trained]),
            engine_logprob_N=np.concatenate([turn.engine_logprobs for turn in trained]),
            version_N=np.zeros(count, np.int32),
            sequence_N=np.zeros(count, np.int64),
            advantage_N=np.repeat([turn.advantage for turn in trained], self._case.answer).astype(np.float32),
            weight_N=np.full(count, 1 / self._tokens, np.float32),
        )
        zeros = np.zeros(count, np.int32)
        return WeightedTrajectory(Trajectory("session", tuple(segments), zeros, zeros), columns)

    def _ids(self, count: int) -> npt.NDArray[np.int32]:
        return self._random.integers(0, VOCABULARY, count).astype(np.int32)
