"""Statistics over the tokens of whole sequences, given to each of their tokens.

Shape suffix: ``N`` tokens of any number of sequences, whose tokens need not stand together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(value_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token gets the sum over its sequence; ``sequence_N`` holds ids of sequences, int64 and at least 0.

    >>> sequence_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([5, 0, 5]))
    tensor([5., 2., 5.])
    """
    if not len(value_N):
        return value_N
    total = torch.zeros(int(sequence_N.max()) + 1, dtype=value_N.dtype, device=value_N.device)
    return total.index_add_(0, sequence_N, value_N)[sequence_N]


def sequence_mean(value_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token gets the mean over its sequence."""
    return sequence_sum(value_N, sequence_N) / sequence_sum(torch.ones_like(value_N), sequence_N)
