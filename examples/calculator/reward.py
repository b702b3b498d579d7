"""Rewards of the two calculator demos. Both look at the calls that were made and at the answer, and nothing else."""

from __future__ import annotations

import re
from typing import Any

from workers.agents.api import Rollout

NUMBER = re.compile(r"-?\d+")


def graded(rollout: Rollout) -> float:
    """0.2 if the first turn is one well-formed call, 0.6 if it is the right one; 0.4 more for the right answer.

    That is one which the model ended by itself and in which the result is the only number.
    """
    calls = rollout.output["calls"]
    if not calls or len(calls[0]) != 1:
        return 0.0
    reward = 0.6 if is_right(calls[0][0], rollout.task) else 0.2
    if _ended(rollout.output) and NUMBER.findall(rollout.output["answer"]) == [str(rollout.task["answer"])]:
        reward += 0.4
    return reward


def exact(rollout: Rollout) -> float:
    """1 for the right call followed by its result and nothing else, 0 for anything less."""
    output, task = rollout.output, rollout.task
    called = [len(turn) for turn in output["calls"]] == [1] and is_right(output["calls"][0][0], task)
    return float(called and _ended(output) and output["answer"] == task["answer"])


def is_right(call: dict[str, Any], task: dict[str, Any]) -> bool:
    """Whether it is the call that the task asks for."""
    return all(call[name] == task[name] for name in ("tool", "a", "b"))


def _ended(output: dict[str, Any]) -> bool:
    """Whether there is an answer and the model ended it by itself."""
    return output["answer"] is not None and output["finish_reason"] == "stop"
