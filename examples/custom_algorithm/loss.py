"""A policy loss of your own: a smooth gate in place of PPO's clip, so that no token loses its gradient at once.

``-A 4 / tau sigmoid(tau (r - 1))``, with a steeper gate for bad tokens; source: SAPO (arXiv 2511.20347).
In the run file: ``algorithm: {loss: "examples.custom_algorithm.loss:soft_gate", minibatches: 2}``.
"""

import torch
from torch import Tensor

from algorithms.policy_loss import PolicyTokens

GOOD, BAD = 1.0, 1.05


def soft_gate(tokens: PolicyTokens) -> Tensor:
    """The loss of each token, differentiable in ``tokens.logprob_N``."""
    ratio_N = torch.exp(tokens.logprob_N - tokens.old_logprob_N)
    tau_N = torch.where(tokens.advantage_N > 0, GOOD, BAD)
    return -tokens.advantage_N * torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
