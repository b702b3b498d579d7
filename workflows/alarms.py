"""What is odd about a step: its figures against the run file's thresholds. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workflows.spec import AlarmSpec

UPPER = {
    "logprob_gap_mean": "engine and trainer disagree on log-probs: is sampling.top_p 1, are the dtypes equal?",
    "importance_p99": "the policy has moved far from what sampled the batch: lower max_staleness or the rate",
    "clip_fraction": "most of the batch teaches nothing: lower the learning rate or the steps per batch",
    "reference_kl": "the policy has left its reference: raise kl_coefficient or lower the learning rate",
    "grad_norm": "the gradient is large: look at the rewards of the last step",
    "staleness_max": "tokens are older than they should be",
}
"""Figures that must not be above their threshold, and what to think of when one is."""
LOWER = {"entropy": "the policy has stopped exploring: raise entropy_coefficient or the temperature"}
"""Figures that must not be below."""


def alarms(figures: Mapping[str, float], thresholds: AlarmSpec) -> tuple[str, ...]:
    """One sentence for each threshold that is crossed, in the order of docs/metrics.md.

    A figure that a step does not have is not looked at.

    >>> alarms({"reward_mean": 1.0, "reward_std": 0.0}, AlarmSpec())[0][:43]
    'every sample of the last step had the same '
    """
    found = [_crossed(name, figures, thresholds, advice, "above") for name, advice in UPPER.items()]
    found += [_crossed(name, figures, thresholds, advice, "below") for name, advice in LOWER.items()]
    return tuple(filter(None, (_constant(figures, thresholds), *found)))


def _constant(figures: Mapping[str, float], thresholds: AlarmSpec) -> str:
    if not thresholds.constant_reward or figures.get("reward_std") != 0:
        return ""
    return (
        f"every sample of the last step had the same reward, {figures.get('reward_mean', 0):g}: "
        "nothing can be learned from it; is the reward right?"
    )


def _crossed(name: str, figures: Mapping[str, float], thresholds: AlarmSpec, advice: str, side: str) -> str:
    limit, value = getattr(thresholds, name), figures.get(name)
    if limit is None or value is None or (value <= limit if side == "above" else value >= limit):
        return ""
    return f"{name} is {value:.4g}, {side} alarms.{name} {limit:g}: {advice}"
