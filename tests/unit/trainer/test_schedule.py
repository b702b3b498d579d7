"""The learning rate rises over the warm-up and falls as the schedule says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workers.trainer.schedule import learning_rate_factor


def factors(make: Any, steps: int, trainer: dict[str, Any], algorithm: dict[str, Any] | None = None) -> list[float]:
    spec = make.make_spec(Path("m"), trainer=trainer, pipeline={"steps": steps}, algorithm=algorithm or {})
    factor = learning_rate_factor(spec)
    return [factor(step) for step in range(steps + 1)]


def test_a_constant_rate_is_the_rate_of_the_run_file(make: Any) -> None:
    assert factors(make, 3, {}) == [1, 1, 1, 1]


def test_the_warm_up_loses_no_step_to_a_rate_of_zero(make: Any) -> None:
    assert factors(make, 5, {"warmup_steps": 3}) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_linear_schedule_falls_to_zero_behind_the_last_step(make: Any) -> None:
    trainer = {"warmup_steps": 1, "schedule": "linear"}
    assert factors(make, 5, trainer) == [0.5, 1, 0.75, 0.5, 0.25, 0]


def test_a_cosine_schedule_is_halfway_down_in_its_middle(make: Any) -> None:
    found = factors(make, 4, {"schedule": "cosine"})
    assert found == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0], abs=1e-12)


def test_a_schedule_can_end_before_the_run(make: Any) -> None:
    assert factors(make, 4, {"schedule": "linear", "schedule_steps": 2}) == [1, 0.5, 0, 0, 0]


def test_a_policy_update_of_several_optimizer_steps_is_one_step_of_the_schedule(make: Any) -> None:
    found = factors(make, 2, {"schedule": "linear"}, {"minibatches": 2, "epochs": 2})
    assert found == [1, 7 / 8, 6 / 8]
