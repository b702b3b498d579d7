"""Weights that average token losses.

Shape suffix: ``S`` sessions of one optimizer step, over all ranks and micro-batches.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def aggregation_weights(tokens_S: Tensor, *, aggregation: Aggregation, length: int | None = None) -> Tensor:
    """Weight of one token of each session, so that ``sum(weight * loss)`` is the loss of the optimizer step.

    ``tokens_S`` is the number of trained tokens of each session; sessions without any get weight 0 and do not count.

    * ``token_mean``: each token counts the same: 1 / all tokens (DAPO, arXiv 2503.14476, section 3.3).
    * ``sequence_mean``: each session counts the same: 1 / (sessions x its tokens) (GRPO, arXiv 2402.03300, equation 3).
    * ``fixed_length``: 1 / (sessions x ``length``): no session's length changes the weight of a token
      (Dr. GRPO, arXiv 2503.20783, section 3.2).

    >>> aggregation_weights(torch.tensor([1, 3]), aggregation="sequence_mean")
    tensor([0.5000, 0.1667])
    """
    trained_S = tokens_S > 0
    sessions = trained_S.sum().clamp(min=1)
    if aggregation == "token_mean":
        each_S = torch.ones_like(tokens_S, dtype=torch.float64) / tokens_S.sum().clamp(min=1)
    elif aggregation == "sequence_mean":
        each_S = 1.0 / (sessions * tokens_S.clamp(min=1)).double()
    else:
        if length is None:
            raise ValueError("fixed_length needs a length in tokens")
        each_S = torch.full_like(tokens_S, 1, dtype=torch.float64) / (sessions * length)
    return torch.where(trained_S, each_S, torch.zeros_like(each_S)).float()
