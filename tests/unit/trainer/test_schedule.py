"""The learning rate rises over the warm-up and falls as the schedule says; settings that cannot act are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from storage.errors import ConfigError
from workers.trainer.deepspeed_config import deepspeed_config, refuse_idle_settings
from workers.trainer.schedule import learning_rate_factor
from workflows.spec import TrainerSpec


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


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"schedule_steps": 4}, "does nothing with the schedule 'constant'"),
        ({"warmup_steps": 10}, "leaves nothing of 10 steps"),
        ({"warmup_steps": 4, "schedule": "cosine", "schedule_steps": 4}, "leaves nothing of 4 steps"),
        ({"zero_stage": 0, "offload": "optimizer"}, "needs zero_stage 1"),
        ({"zero_stage": 2, "offload": "parameters"}, "needs zero_stage 3"),
    ],
)
def test_a_setting_that_could_not_act_is_refused(make: Any, trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make.make_spec(Path("m"), trainer=trainer, pipeline={"steps": 10})


def test_offload_is_refused_on_the_cpu_and_told_to_deepspeed_on_a_gpu() -> None:
    trainer = TrainerSpec(zero_stage=3, offload="parameters")
    with pytest.raises(ConfigError, match=r"offload parameters .* computes on the CPU"):
        refuse_idle_settings(trainer, torch.device("cpu"))
    gpu = torch.device("cuda")
    refuse_idle_settings(trainer, gpu)
    zero = deepspeed_config(trainer, torch.nn.Linear(2, 2), "bfloat16", gpu)["zero_optimization"]
    assert {zero["offload_optimizer"]["device"], zero["offload_param"]["device"]} == {"cpu"}
    alone = TrainerSpec(zero_stage=1, offload="optimizer")
    assert "offload_param" not in deepspeed_config(alone, torch.nn.Linear(2, 2), "float32", gpu)["zero_optimization"]
