"""From logits to tokens and their log-probs, for a batch of requests with different parameters.

Draws are keyed by (seed, position): the token at position p of a sequence depends on its seed, p and the logits, not on
batch mates or on how often the sequence was cut and continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of the batch asks for."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    uniform: float
    """In [0, 1)."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Token -> number added to its logit."""
    top: int = 0
    """How many of the likeliest tokens are reported."""

    @property
    def filtered(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class Sampled(NamedTuple):
    """One row's token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probs, likeliest first."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, from two rounds of splitmix64."""
    state = seed & _MASK
    for salt in (position, 0):
        state = (state + 0x9E3779B97F4A7C15 * (salt + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 40) / (1 << 24)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token for each row of ``logits`` [N, V], float32; ``logits`` is overwritten.

    Log-probs are of softmax(logits / temperature), of softmax(logits) for greedy rows; top-p, top-k and min-p choose
    the token but do not change its log-prob (SGLang's convention).
    """
    greedy = [index for index, draw in enumerate(draws) if draw.temperature == 0]
    for index, draw in enumerate(draws):
        if draw.bias:
            logits[index, list(draw.bias)] += torch.tensor(list(draw.bias.values()))
    if any(draw.temperature not in (0, 1) for draw in draws):
        logits.div_(torch.tensor([draw.temperature or 1.0 for draw in draws]).unsqueeze(1))
    logits.sub_(logits.amax(-1, keepdim=True))
    weights = logits.exp()
    log_total = weights.sum(-1).log_()
    if len(greedy) == len(draws):
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(_filter(weights, draws), [draw.uniform for draw in draws])
        if greedy:
            tokens[greedy] = logits[greedy].argmax(-1)
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - log_total
    tops = [_top(logits[index], log_total[index], draw.top) for index, draw in enumerate(draws)]
    return [Sampled(*row) for row in zip(tokens.tolist(), logprobs.tolist(), tops, strict=True)]


def _top(logits: Tensor, log_total: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` likeliest tokens of one row."""
    if not count:
        return ()
    values, tokens = logits.topk(min(count, len(logits)))
    return tuple(zip(tokens.tolist(), (values - log_total).tolist(), strict=True))


def _invert(weights: Tensor, uniforms: list[float]) -> Tensor:
    """Where the running sum of each row passes ``uniform`` times its total: tokens [N]."""
    sums = weights.cumsum(-1)
    targets = torch.tensor(uniforms).unsqueeze(1) * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _filter(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Zero what top-k, top-p and min-p exclude, in the rows that ask for it."""
    for index, draw in enumerate(draws):
        if not draw.filtered:
            continue
        row = weights[index]
        ordered, order = row.sort(descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if draw.top_k > 0:
            keep[draw.top_k :] = False
        if draw.top_p < 1.0:
            # A token stays while those before it do not reach top_p; the first always stays.
            shares = (ordered * keep).cumsum(0) - ordered
            keep &= shares <= draw.top_p * (ordered * keep).sum()
        if draw.min_p > 0.0:
            keep &= ordered >= draw.min_p * ordered[0]
        row[order[~keep]] = 0.0
    return weights
