"""A reward is a finite number or it is missing; it is never made up."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.agents.command import CommandReward
from workers.agents.outcome import Outcome, judge_reward
from workers.agents.pool import ProcessPool, Setup

ROLLOUT: dict[str, Any] = {"task": {"answer": 48}, "output": "48", "turns": [{"request": {}, "response": {}}]}

REWARDS = """
import time

def good(rollout):
    return float(rollout.output == str(rollout.task["answer"])) + len(rollout.turns)

async def later(rollout):
    return 0.25

def none(rollout):
    return None

def nan(rollout):
    return float("nan")

def text(rollout):
    return "1.0"

def broken(rollout):
    raise KeyError("no such field")

def hangs(rollout):
    time.sleep(3600)
"""


@pytest.mark.parametrize("value", [1, 0, 0.5, -3, True, np.float32(0.5), np.int64(2), Fraction(1, 2)])
def test_a_finite_number_is_a_reward(value: Any) -> None:
    assert judge_reward(value) == Outcome("ok", float(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1.0", "", [1.0], {"reward": 1}, 1j])
def test_anything_else_is_invalid(value: Any) -> None:
    assert judge_reward(value).status == "invalid"


def test_none_is_missing() -> None:
    assert judge_reward(None).status == "missing"


@pytest.fixture
async def reward(tmp_path: Path) -> AsyncIterator[Callable[[str], ProcessPool]]:
    (tmp_path / "their_rewards.py").write_text(REWARDS)
    made: list[ProcessPool] = []

    def make(function: str) -> ProcessPool:
        made.append(ProcessPool(Setup("reward", f"their_rewards:{function}", str(tmp_path))))
        return made[-1]

    yield make
    for pool in made:
        await pool.close()


@pytest.mark.parametrize(
    ("function", "status", "value"),
    [
        ("good", "ok", 2.0),
        ("later", "ok", 0.25),
        ("none", "missing", None),
        ("nan", "invalid", None),
        ("text", "invalid", None),
        ("broken", "error", None),
    ],
)
async def test_a_reward_function_is_judged_by_what_it_returns(
    reward: Callable[[str], ProcessPool], function: str, status: str, value: float | None
) -> None:
    outcome = await reward(function).run("s1", ROLLOUT, 30.0)
    assert (outcome.status, outcome.value) == (status, value)


async def test_a_reward_that_raises_is_quoted(reward: Callable[[str], ProcessPool]) -> None:
    assert "KeyError: 'no such field'" in (await reward("broken").run("s1", ROLLOUT, 30.0)).detail


async def test_a_reward_that_hangs_times_out(reward: Callable[[str], ProcessPool]) -> None:
    assert (await reward("hangs").run("s1", ROLLOUT, 0.2)).status == "timeout"


@pytest.mark.parametrize(
    ("code", "status", "value"),
    [
        ("print(len(json.load(sys.stdin)['turns']))", "ok", 1.0),
        ("print('null')", "missing", None),
        ("pass", "missing", None),
        ("print('high')", "invalid", None),
        ("print('nan')", "invalid", None),
        ("print(1); sys.exit(2)", "error", None),
        ("import time; time.sleep(3600)", "timeout", None),
    ],
)
async def test_a_reward_command_reads_the_rollout_and_prints_a_number(
    code: str, status: str, value: float | None
) -> None:
    command = CommandReward(f'{sys.executable} -c "import json, sys; {code}"', None)
    outcome = await command.run("s1", ROLLOUT, 1.0 if status == "timeout" else 30.0)
    assert (outcome.status, outcome.value) == (status, value)
