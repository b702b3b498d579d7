"""A real measurement of this machine, in a process of its own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from storage.errors import ConfigError
from workers.node_agent.profiler import measure
from workflows.messages import ProfileTask


async def test_a_model_is_measured_in_both_roles_with_the_error_of_each(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    found = await measure(ProfileTask(node="n1", model=str(tmp_path)))
    assert (found.node, found.model) == ("n1", str(tmp_path))
    assert [rate.role for rate in found.rates] == ["decode", "train"]
    assert all(rate.predicted and rate.error is not None and math.isfinite(rate.error) for rate in found.rates)
    assert found.device.decode_step_s > 0
    assert found.train_priority > 0


async def test_a_folder_without_a_model_is_refused_with_what_was_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        await measure(ProfileTask(node="n1", model=str(tmp_path)))
