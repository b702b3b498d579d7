"""Policy losses per token: all have the policy gradient ``-A grad(log pi)`` while the ratio is 1.

Shape suffix: ``N`` trained tokens, of any number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyTokens:
    """Trained tokens of one micro-batch: what a loss named by dotted path is called with, for one Tensor of shape (N,).

    All float32 unless said otherwise; only ``logprob_N`` has a gradient.
    """

    logprob_N: Tensor
    """Under the weights held now."""
    old_logprob_N: Tensor
    """Under the proximal policy: the weights before the batch's first optimizer step, or those of sampling."""
    engine_logprob_N: Tensor
    """As recorded at sampling."""
    advantage_N: Tensor
    sequence_log_ratio_N: Tensor
    """Mean over the token's sequence of ``logprob - old_logprob``, over all micro-batches and ranks."""
    staleness_N: Tensor
    """int64; updates between the weights that made the token and those before the batch."""


class TokenLoss(NamedTuple):
    """What a loss gives for each token."""

    loss_N: Tensor
    """Not yet weighted; differentiable in the log-probs."""
    ratio_N: Tensor
    """exp(log-prob - old log-prob), of the sequence for GSPO; detached."""
    clipped_N: Tensor
    """True where a clip, not the ratio, decides the loss."""


def clipped_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds, and a bound for negative advantages.

    ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; where ``A < 0`` at most ``-A dual_clip``. A clipped token
    has no gradient.

    Sources: PPO (arXiv 1707.06347) equation 7; clip-higher, DAPO (arXiv 2503.14476) section 3.1; dual clip
    (arXiv 1912.09729).
    """
    ratio_N = torch.exp(logprob_N - old_logprob_N.detach())
    return _clip(ratio_N, advantage_N, clip_low, clip_high, dual_clip)


def sequence_clipped_loss(
    logprob_N: Tensor, sequence_log_ratio_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """GSPO: the ratio is one number per sequence, the geometric mean of its tokens' ratios, and so is the clip.

    ``s = exp(mean(log pi - log pi_old))``; per token ``max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high))`` with
    ``s_t = sg(s) pi / sg(pi)``: same value and, averaged over the sequence, same gradient as the loss of the sequence,
    but its tokens may lie in different micro-batches. ``sequence_log_ratio_N`` is the mean, the same for all of them.

    Source: GSPO (arXiv 2507.18071) equations 5, 7, 13 and 14 (GSPO-token).
    """
    ratio_N = torch.exp(sequence_log_ratio_N.detach() + logprob_N - logprob_N.detach())
    return _clip(ratio_N, advantage_N, clip_low, clip_high, None)


def cispo_loss(logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, *, clip_high: float) -> TokenLoss:
    """CISPO: the clipped ratio is a constant weight of the policy gradient, so that a clipped token still learns.

    ``-A sg(min(r, 1 + clip_high)) log pi``; no lower bound, as in the paper's experiments.
    Source: MiniMax-M1 (arXiv 2506.13585) equations 4 and 5.
    """
    ratio_N = torch.exp(logprob_N - old_logprob_N).detach()
    return TokenLoss(-advantage_N * ratio_N.clamp(max=1.0 + clip_high) * logprob_N, ratio_N, ratio_N > 1.0 + clip_high)


def policy_gradient_loss(logprob_N: Tensor, advantage_N: Tensor) -> TokenLoss:
    """``-A log pi``: plain policy gradient, without a ratio.

    Source: REINFORCE, Williams 1992 (doi 10.1007/BF00992696).
    """
    ones_N = torch.ones_like(logprob_N.detach())
    return TokenLoss(-advantage_N * logprob_N, ones_N, torch.zeros_like(ones_N, dtype=torch.bool))


def _clip(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float | None) -> TokenLoss:
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * ratio_N.clamp(1.0 - low, 1.0 + high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual is not None:
        ceiling_N = -advantage_N * dual
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return TokenLoss(loss_N, ratio_N.detach(), clipped_N.detach())
