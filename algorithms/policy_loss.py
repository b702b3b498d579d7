"""Policy losses per token, and the weights that average them.

Shape suffixes: ``N`` trained tokens, of any number of sessions; ``S`` sessions.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """What :func:`clipped_loss` gives for each token."""

    loss_N: Tensor
    """Loss, not yet weighted; differentiable in the log-probs."""
    ratio_N: Tensor
    """exp(log-prob - old log-prob), detached."""
    clipped_N: Tensor
    """True where a clip, not the ratio, decides the loss: the token has no gradient."""


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

    ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; where ``A < 0`` at most ``-A dual_clip``.

    Sources: PPO (arXiv 1707.06347) equation 7; clip-higher, DAPO (arXiv 2503.14476) section 3.1; dual clip
    (arXiv 1912.09729).
    """
    ratio_N = torch.exp(logprob_N - old_logprob_N.detach())
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        ceiling_N = -advantage_N * dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return TokenLoss(loss_N, ratio_N.detach(), clipped_N.detach())


def truncated_importance(old_logprob_N: Tensor, engine_logprob_N: Tensor, *, cap: float) -> Tensor:
    """Weight that corrects for tokens having been sampled by other log-probs than the loss assumes; no gradient.

    ``min(exp(old - engine), cap)``: engine and trainer differ by their kernels, and by weights when the token is
    older than the update. Truncation trades a little bias for a bounded variance.

    Sources: truncated importance sampling (Ionides 2008, doi 10.1198/106186008X320456); per token and
    apart from the clipped ratio: decoupled PPO (arXiv 2110.00641), in asynchronous RL: AReaL (arXiv 2505.24298).
    """
    return torch.exp(old_logprob_N.detach() - engine_logprob_N).clamp(max=cap)


def aggregation_weights(tokens_S: Tensor, *, aggregation: Literal["token_mean", "sequence_mean"]) -> Tensor:
    """Weight of one token of each session, so that ``sum(weight * loss)`` over the whole batch is the batch loss.

    ``tokens_S`` is the number of trained tokens of each session in the whole batch, over all ranks and micro-batches;
    sessions without trained tokens get weight 0 and do not count.

    * ``token_mean``: each token counts the same: 1 / all tokens (DAPO, arXiv 2503.14476, section 3.3).
    * ``sequence_mean``: each session counts the same: 1 / (sessions x its tokens) (GRPO, arXiv 2402.03300, equation 3).

    >>> aggregation_weights(torch.tensor([1, 3]), aggregation="sequence_mean")
    tensor([0.5000, 0.1667])
    """
    trained_S = tokens_S > 0
    if aggregation == "token_mean":
        each_S = torch.ones_like(tokens_S, dtype=torch.float64) / tokens_S.sum().clamp(min=1)
    else:
        each_S = 1.0 / (trained_S.sum().clamp(min=1) * tokens_S.clamp(min=1)).double()
    return torch.where(trained_S, each_S, torch.zeros_like(each_S)).float()
