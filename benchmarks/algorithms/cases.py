"""What is compared: our run-file keys, and how each peer is told the same. Read by both sides, so it imports nothing.

``trl`` are attributes of its GRPO trainer; ``verl`` names a policy loss and the settings of its actor, or an advantage
estimator. A peer that lacks something has no entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 3.0}
_VERL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
_STEPS: dict[str, Any] = {"epochs": 2, "correction": "none"}
_GSPO = {"clip_low": 0.03, "clip_high": 0.04}
LENGTH = 32


class Case(NamedTuple):
    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] | None = None
    verl: dict[str, Any] | None = None
    intended: str = ""
    """Why a difference is meant."""
    bound: float = 1e-6
    """Of differences: by default what float32 rounds; of those that are meant, what their reason explains."""


LOSSES = [
    Case(
        "clip, token mean",
        _STEPS,
        {"loss_type": "dapo", **_CLIP},
        {"loss": "vanilla", "mode": "token-mean", **_VERL_CLIP},
    ),
    Case(
        "clip, sequence mean",
        {**_STEPS, "aggregation": "sequence_mean"},
        {"loss_type": "grpo", **_CLIP},
        {"loss": "vanilla", "mode": "seq-mean-token-mean", **_VERL_CLIP},
    ),
    Case(
        "clip, fixed length",
        {**_STEPS, "aggregation": "fixed_length", "aggregation_length": LENGTH},
        {"loss_type": "dr_grpo", **_CLIP},
        {"loss": "vanilla", "mode": "seq-mean-token-sum-norm", "loss_scale_factor": LENGTH, **_VERL_CLIP},
    ),
    Case(
        "gspo",
        {"name": "gspo", **_STEPS, **_GSPO},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"loss": "gspo", "mode": "seq-mean-token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
    ),
    Case(
        "cispo",
        {"name": "cispo", **_STEPS, "clip_high": 0.5},
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss": "cispo", "mode": "token-mean", "clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
    ),
    Case(
        "policy gradient",
        {"name": "rloo", "correction": "none"},
        None,
        {"loss": "gpg", "mode": "token-mean"},
    ),
    Case(
        "soft gate of examples/",
        {**_STEPS, "aggregation": "sequence_mean", "loss": "examples.custom_algorithm.loss:soft_gate"},
        {"loss_type": "sapo"},
        {"loss": "sapo", "mode": "seq-mean-token-mean"},
    ),
    Case(
        "clip, KL k3 in the loss",
        {**_STEPS, "kl": "k3", "kl_coefficient": 0.1},
        {"loss_type": "dapo", "beta": 0.1, **_CLIP},
        {"loss": "vanilla", "mode": "token-mean", "kl": "k3", "kl_coefficient": 0.1, **_VERL_CLIP},
    ),
    Case(
        "clip, KL k2 in the loss",
        {**_STEPS, "kl": "k2", "kl_coefficient": 0.1},
        None,
        {"loss": "vanilla", "mode": "token-mean", "kl": "k2", "kl_coefficient": 0.1, **_VERL_CLIP},
    ),
    Case(
        "clip, entropy bonus",
        {**_STEPS, "entropy_coefficient": 0.05},
        {"loss_type": "dapo", "entropy_coef": 0.05, **_CLIP},
    ),
    Case(
        "entropy bonus, sequence mean",
        {**_STEPS, "entropy_coefficient": 0.05, "aggregation": "sequence_mean"},
        {"loss_type": "grpo", "entropy_coef": 0.05, **_CLIP},
        None,
        "TRL averages the entropy over tokens whatever the loss; ours is averaged as the loss is",
        1e-3,
    ),
    *(
        Case(
            f"clip, {kind} by {level}",
            {"epochs": 2, "correction": kind, "correction_level": level},
            None,
            {"loss": "vanilla", "mode": "token-mean", "correction": [level, band], **_VERL_CLIP},
        )
        for kind, level, band in (
            ("truncate", "token", 2.0),
            ("truncate", "sequence", 2.0),
            ("mask", "token", "0.5_5.0"),
            ("mask", "sequence", "0.5_5.0"),
        )
    ),
    Case("value loss, clipped", {"name": "ppo", "epochs": 2, "value_clip": 0.2}, None, {"value_clip": 0.2}),
]

_WHITENING = "verl divides by sqrt(var + 1e-8), ours by std + 1e-6"
ADVANTAGES = [
    Case("advantage grpo", {"name": "grpo"}, None, {"estimator": "grpo"}),
    Case(
        "advantage dr_grpo",
        {"advantage": "dr_grpo"},
        None,
        {"estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    ),
    Case("advantage rloo", {"name": "rloo"}, None, {"estimator": "rloo"}),
    Case(
        "advantage reinforce_pp",
        {"name": "reinforce_pp", "discount": 0.9, "discount_per": "token"},
        None,
        {"estimator": "reinforce_plus_plus", "gamma": 0.9},
        _WHITENING,
        2e-5,
    ),
    Case(
        "advantage reinforce_pp_baseline",
        {"name": "reinforce_pp_baseline"},
        None,
        {"estimator": "reinforce_plus_plus_baseline"},
        _WHITENING,
        2e-5,
    ),
    Case(
        "advantage gae",
        {"name": "ppo", "discount": 0.9, "gae_lambda": 0.8, "discount_per": "token"},
        None,
        {"estimator": "gae", "gamma": 0.9, "lam": 0.8},
        _WHITENING,
        2e-5,
    ),
]
