"""Estimates of KL(policy || reference) from tokens that the policy sampled.

Shape suffix: ``N`` tokens. Source of all three: Schulman 2020, "Approximating KL divergence"; of their gradients as a
loss: arXiv 2510.01555.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def k1(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """``log pi - log ref``: unbiased, can be negative. As a loss it teaches nothing: its expected gradient is 0."""
    return logprob_N - reference_N


def k2(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """``(log pi - log ref)^2 / 2``: biased, never negative; as a loss, on-policy, its gradient is that of the KL."""
    return (logprob_N - reference_N).square() / 2


def k3(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """``ref / pi - 1 - log(ref / pi)``: unbiased, never negative; GRPO's (arXiv 2402.03300 equation 4).

    As a loss its gradient is that of the KL only where policy and reference are close.
    """
    log_N = reference_N - logprob_N
    return torch.expm1(log_N) - log_N


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
