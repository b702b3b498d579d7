"""Predicted seconds against published measurements, and the devices and models they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import ConfigError
from workflows.scheduling.decision import Decision
from workflows.scheduling.devices import DEVICES
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import (
    Load,
    decode_step_s,
    fewest_devices,
    kv_tokens,
    prefill_s,
    rates,
    train_priority,
    train_s,
)

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SMOLLM2_135M = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

# tgarg01/silybench-data: one H100-80GB, Qwen3-8B. dtype, prompt and answer tokens, users, measured tokens/s, and the
# error in percent that the fit is published with.
MEASURED = [
    ("bfloat16", 128, 1024, 396, 13322, -3),
    ("bfloat16", 2048, 2048, 40, 2815, -12),
    ("bfloat16", 8192, 512, 7, 502, 0),
    ("bfloat16", 1024, 128, 80, 3018, -16),
    ("bfloat16", 128, 128, 512, 14540, -12),
    ("fp8", 128, 1024, 472, 15103, 0),
    ("fp8", 2048, 2048, 52, 3653, -5),
    ("fp8", 2048, 2048, 4, 716, 6),
    ("fp8", 2048, 2048, 1, 208, 3),
    ("fp8", 8192, 512, 10, 787, 10),
    ("fp8", 1024, 128, 108, 4129, 5),
    ("fp8", 128, 128, 512, 16542, 14),
]


@pytest.mark.parametrize(("dtype", "prompt", "answer", "users", "measured", "error"), MEASURED)
def test_served_tokens_of_an_h100_are_predicted_within_the_stated_error(
    dtype: str, prompt: int, answer: int, users: int, measured: float, error: float
) -> None:
    model, device = ModelCost.from_config(QWEN3_8B, dtype), DEVICES["H100"]
    if dtype == "fp8":
        device = device.model_copy(update={"peak_flops": 1979e12})
    step = decode_step_s(device, model, users, users * (prompt + answer / 2))
    prompts = users / answer * prefill_s(device, model, prompt)  # those that begin during one step
    predicted = users / (step + prompts)
    assert 100 * (predicted / measured - 1) == pytest.approx(error, abs=4)  # the fit leaves out attention over prompts
    assert abs(predicted / measured - 1) <= 0.17


@pytest.mark.parametrize(
    ("config", "parameters", "active", "kv_bytes"),
    [
        (QWEN3_8B, 8.19e9, 8.19e9, 147456),
        (QWEN3_32B, 32.8e9, 32.8e9, 262144),
        (QWEN3_30B_A3B, 30.5e9, 3.3e9, 98304),
        (SMOLLM2_135M, 134.5e6, 134.5e6, 46080),
    ],
    ids=["qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "smollm2-135m"],
)
def test_a_models_cost_is_that_of_its_model_card(
    config: dict[str, Any], parameters: float, active: float, kv_bytes: int
) -> None:
    model = ModelCost.from_config(config)
    assert model.parameters == pytest.approx(parameters, rel=0.01)
    assert model.active_parameters == pytest.approx(active, rel=0.02)
    assert model.kv_bytes_per_token == kv_bytes


def test_a_config_without_a_size_is_refused_with_the_name_of_the_key() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is None"):
        ModelCost.from_config({"hidden_size": 8})


def test_an_unknown_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'int3'.*bfloat16"):
        ModelCost.from_config(QWEN3_8B, "int3")


def test_kv_capacity_is_what_is_left_beside_the_weights() -> None:
    h800 = DEVICES["H800"]
    assert kv_tokens(h800, ModelCost.from_config(QWEN3_8B)) == pytest.approx(350_000, rel=0.01)
    assert kv_tokens(h800, ModelCost.from_config(QWEN3_32B), 2) == pytest.approx(269_000, rel=0.01)
    assert kv_tokens(h800, ModelCost.from_config(QWEN3_32B), 4) == pytest.approx(787_000, rel=0.01)
    assert kv_tokens(DEVICES["L40S"], ModelCost.from_config(QWEN3_32B)) == 0


def test_a_model_that_does_not_fit_is_spread_over_more_devices() -> None:
    assert fewest_devices(DEVICES["H100"], ModelCost.from_config(QWEN3_8B)) == 1
    assert fewest_devices(DEVICES["H100"], ModelCost.from_config(QWEN3_32B)) == 1
    assert fewest_devices(DEVICES["L40S"], ModelCost.from_config(QWEN3_32B)) == 2


def test_a_small_batch_of_a_mixture_reads_few_experts_and_a_large_one_all() -> None:
    mixture = ModelCost.from_config(QWEN3_30B_A3B)
    assert mixture.read_bytes(1) == pytest.approx(mixture.active_parameters * 2, rel=0.02)
    assert mixture.read_bytes(1000) == pytest.approx(mixture.weight_bytes, rel=1e-6)


def test_train_flops_of_a_token_are_six_times_the_parameters_and_attention() -> None:
    model, device = ModelCost.from_config(QWEN3_8B), DEVICES["H800"]
    seconds = train_s(device, model, 1_000_000, context=0)
    assert seconds == pytest.approx(6 * 8.19e9 * 1e6 / (0.30 * 989e12), rel=0.01)
    assert train_s(device, model, 1_000_000, context=32768) > 1.5 * seconds


def test_devices_with_much_compute_for_their_bandwidth_are_taken_for_training_first() -> None:
    model = ModelCost.from_config(QWEN3_8B)
    order = sorted(("H20", "H800", "L40S"), key=lambda name: -train_priority(DEVICES[name], model))
    assert order == ["L40S", "H800", "H20"]


def test_an_h20_decodes_like_an_h800_and_trains_seven_times_slower() -> None:
    model = ModelCost.from_config(QWEN3_8B)
    h20, h800 = (rates(DEVICES[name], model, Load(batch=32, context=8192)) for name in ("H20", "H800"))
    assert h20.decode == pytest.approx(h800.decode, rel=0.25)
    assert h800.train / h20.train == pytest.approx(989 / 148, rel=0.01)


def test_a_decision_is_one_line_with_its_facts_and_prediction() -> None:
    decision = Decision(what="train", why="enough", facts={"groups": 4, "cost_s": 1.5}, predicted_gain_s=2)
    assert decision.line() == "train: enough (groups 4, cost_s 1.5); predicted gain 2.0 s"
