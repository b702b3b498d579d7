"""The run file's algorithm: names stand for parts, and a key that would do nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workflows.algorithm import AlgorithmSpec


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grpo", ("grpo", "clip", "token_mean")),
        ("dr_grpo", ("dr_grpo", "clip", "fixed_length")),
        ("rloo", ("rloo", "policy_gradient", "token_mean")),
        ("reinforce_pp", ("reinforce_pp", "clip", "token_mean")),
        ("reinforce_pp_baseline", ("reinforce_pp_baseline", "clip", "token_mean")),
        ("gspo", ("grpo", "gspo", "sequence_mean")),
        ("cispo", ("grpo", "cispo", "token_mean")),
        ("ppo", ("gae", "clip", "token_mean")),
    ],
)
def test_a_name_stands_for_an_advantage_a_loss_and_an_aggregation(name: Any, parts: tuple[str, ...]) -> None:
    length = 100 if name == "dr_grpo" else None
    spec = AlgorithmSpec(name=name, aggregation_length=length)
    assert (spec.advantage_used, spec.loss_used, spec.aggregation_used) == parts


def test_each_part_can_be_replaced() -> None:
    spec = AlgorithmSpec(name="gspo", advantage="rloo", aggregation="token_mean")
    assert (spec.advantage_used, spec.loss_used, spec.aggregation_used) == ("rloo", "gspo", "token_mean")


def test_bounds_are_those_of_the_loss_unless_set() -> None:
    assert AlgorithmSpec(name="gspo").bound("clip_high") == 4e-4
    assert AlgorithmSpec(name="gspo", epochs=2, clip_high=0.1).bound("clip_high") == 0.1
    assert AlgorithmSpec(correction="mask").bound("correction_cap") == 5.0
    assert AlgorithmSpec().bound("correction_cap") == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"clip_low": 0.1},  # one optimizer step: the ratio is 1
        {"clip_high": 0.1},
        {"dual_clip": 5.0},
        {"name": "cispo", "epochs": 2, "clip_low": 0.1},
        {"name": "gspo", "epochs": 2, "dual_clip": 3.5},
        {"name": "rloo", "old_logprobs": "engine"},
        {"old_logprobs": "engine", "correction": "truncate"},
        {"old_logprobs": "engine", "correction_cap": 3.0},
        {"correction": "none", "correction_level": "sequence"},
        {"correction_floor": 0.1},  # truncation has no floor
        {"sequence": "turn"},
        {"stale_tokens": "mask"},
        {"aggregation_length": 100},
        {"discount_per": "token"},
        {"gae_lambda": 0.9},
        {"kl_in": "reward"},
        {"kl_coefficient": 0.1},
        {"reference": "/models/reference"},
        {"critic": "/models/critic"},
        {"critic_learning_rate": 1e-6},
        {"critic_warmup": 3},
        {"name": "ppo", "value_clip": 0.2},  # one optimizer step: the value has not moved
    ],
    ids=lambda change: " ".join(map(str, change)),
)
def test_a_key_that_would_do_nothing_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=rf"{list(change)[-1]} does nothing here: .*, or remove it"):
        AlgorithmSpec(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "dr_grpo"}, r"fixed_length needs aggregation_length"),
        ({"kl": "k3"}, r"kl 'k3' needs kl_coefficient"),
        ({"kl": "k1", "kl_coefficient": 0.1}, r"expected gradient of 0"),
        ({"minibatches": 9}, r"minibatches 9 exceed the 8 groups"),
        ({"correction": "mask", "correction_floor": 6.0}, r"correction_floor must be below correction_cap"),
        ({"group_size": 1}, r"advantage 'grpo' is relative to the group"),
        ({"advantage": "no-path"}, r"advantage"),
    ],
    ids=str,
)
def test_what_is_missing_or_contradicts_itself_is_told(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSpec(**change)


def test_an_advantage_of_the_user_s_may_do_with_one_sample_and_decides_itself_what_equal_rewards_teach() -> None:
    spec = AlgorithmSpec(advantage="mine:one", group_size=1)
    assert not spec.drops_zero_variance


@pytest.mark.parametrize(("name", "drops"), [("grpo", True), ("reinforce_pp", False), ("ppo", False)])
def test_groups_of_equal_rewards_are_filtered_where_they_teach_nothing(name: Any, drops: bool) -> None:
    assert AlgorithmSpec(name=name).drops_zero_variance is drops
    assert AlgorithmSpec(name=name, drop_zero_variance=not drops).drops_zero_variance is not drops


def test_a_spec_survives_json() -> None:
    spec = AlgorithmSpec(name="ppo", epochs=2, value_clip=0.2, kl="k3", kl_coefficient=0.1, group_size=1)
    assert AlgorithmSpec.model_validate_json(spec.model_dump_json()) == spec
