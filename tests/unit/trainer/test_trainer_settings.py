"""Settings of the trainer act, or are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from storage.errors import ConfigError
from workers.trainer.deepspeed_config import choose_kernels, deepspeed_config, refuse_idle_settings
from workflows.spec import TrainerSpec


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


def test_only_a_run_that_says_so_may_use_kernels_that_depend_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        choose_kernels(TrainerSpec(deterministic=False))
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        choose_kernels(TrainerSpec())
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)  # torch names it so
