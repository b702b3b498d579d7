"""A policy loss that fails on purpose, as a token says: the fault is in the data, so tests script it in a shard.

``algorithm.loss: workers.trainer.scripted_loss:loss`` is the plain policy gradient, but for tokens whose recorded
log-prob is one of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.policy_loss import PolicyTokens

NO_NUMBER = -70.0
"""Its loss is NaN."""
NO_SLOPE = -71.0
"""Its loss is finite, the gradient of it is not."""
NO_GPU_MEMORY = -72.0
NO_CPU_MEMORY = -73.0
NO_PYTHON_MEMORY = -74.0
"""Raises what the three allocators raise."""


def loss(tokens: PolicyTokens) -> Tensor:
    """Shape (N,), as the loss of a user; see the module."""
    engine_N, logprob_N = tokens.engine_logprob_N, tokens.logprob_N
    if (engine_N == NO_GPU_MEMORY).any():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (scripted)")
    if (engine_N == NO_CPU_MEMORY).any():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 GiB (scripted)")
    if (engine_N == NO_PYTHON_MEMORY).any():
        raise MemoryError
    loss_N = torch.where(engine_N == NO_NUMBER, torch.nan, -logprob_N * tokens.advantage_N)
    steep = (engine_N == NO_SLOPE).nonzero()[:, 0]
    rise = (logprob_N[steep] - logprob_N[steep].detach()).sqrt()  # 0, with an infinite slope
    return loss_N.index_add(0, steep, rise)
