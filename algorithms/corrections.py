"""Off-policy corrections: weights for tokens that other weights or kernels sampled than the loss assumes.

The loss assumes the proximal policy (the trainer's weights before the update); the behaviour policy is what the engine
sampled from: older weights, other kernels. Weights are constants (no gradient) and apart from the clipped ratio, which
makes the whole decoupled PPO: ``w = pi_prox / pi_behav``, ``ratio = pi / pi_prox`` (arXiv 2110.00641; in asynchronous
RL: AReaL, arXiv 2505.24298, section 5).

Shape suffix: ``N`` trained tokens of any number of sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algorithms.sequences import sequence_mean, sequence_sum

Level = Literal["token", "sequence", "geometric"]


def importance(old_logprob_N: Tensor, engine_logprob_N: Tensor, *, level: Level, sequence_N: Tensor | None) -> Tensor:
    """``pi_prox / pi_behav`` of each token, or of its sequence.

    * ``token``: exp(old - engine). Biased for sequences, low variance.
    * ``sequence``: the product over the sequence: unbiased, its variance grows with length.
    * ``geometric``: the product's root of the length, as in GSPO (arXiv 2507.18071 equation 7).
    """
    log_N = (old_logprob_N - engine_logprob_N).detach()
    if level != "token":
        if sequence_N is None:
            raise ValueError(f"level {level!r} needs to know which tokens make a sequence")
        log_N = (sequence_sum if level == "sequence" else sequence_mean)(log_N, sequence_N)
    return torch.exp(log_N)


def truncate(importance_N: Tensor, *, cap: float) -> Tensor:
    """``min(w, cap)``: truncation trades a little bias for a bounded variance.

    Sources: Ionides 2008 (doi 10.1198/106186008X320456); for the mismatch of engine and trainer: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return importance_N.clamp(max=cap)


def mask_outside(importance_N: Tensor, *, floor: float, cap: float) -> Tensor:
    """``w`` inside the band, 0 outside: tokens (or sequences) on which the two policies disagree train nothing.

    Source: IcePop, in Ring-1T (arXiv 2510.18855), with floor 0.5 and cap 5.
    """
    inside_N = (importance_N >= floor) & (importance_N <= cap)
    return torch.where(inside_N, importance_N, torch.zeros_like(importance_N))


def fresh(version_N: Tensor, *, step: int, cap: int) -> Tensor:
    """True where a token is at most ``cap`` updates older than the weights that train it, which are version ``step``.

    Source: the staleness bound of AReaL (arXiv 2505.24298) section 5, here by token: a generation that was
    interrupted holds several versions.
    """
    return step - version_N <= cap
