"""The loss of one micro-batch, and the sums from which a step's metrics are made. Knows no back end.

Shape suffixes: ``N`` trained tokens of the micro-batch, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from algorithms.policy_loss import clipped_loss, truncated_importance
from workers.trainer.packing import MicroBatch
from workflows.spec import AlgorithmSpec


@dataclass
class StepSums:
    """Sums and maxima over trained tokens; additive over micro-batches and ranks."""

    loss: float = 0.0
    tokens: float = 0.0
    clipped: float = 0.0
    importance: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    advantage_abs: float = 0.0
    ratio_max: float = field(default=0.0, metadata={"max": True})
    gap_max: float = field(default=0.0, metadata={"max": True})

    def add(self, other: StepSums) -> None:
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, max(mine, theirs) if f.metadata.get("max") else mine + theirs)

    def mean(self, name: str) -> float:
        """Per trained token; 0 if there is none."""
        return float(getattr(self, name)) / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Objective:
    """The run's policy loss."""

    algorithm: AlgorithmSpec
    temperature: float
    """Of the sampling policy: what it sampled from is softmax(logits / temperature)."""

    def __call__(self, logits_NV: Tensor, batch: MicroBatch) -> tuple[Tensor, StepSums]:
        """This micro-batch's part of the batch loss (differentiable), and its sums.

        There is one optimizer step per batch, so the weights that compute ``logits_NV`` are those before the update:
        the recomputed old log-probs *are* the current ones without gradient, and no second forward pass is made.
        With several optimizer steps per batch that would no longer hold.
        """
        device = logits_NV.device
        target_N = torch.from_numpy(batch.target_N).to(device)
        engine_N = torch.from_numpy(batch.engine_logprob_N).to(device)
        advantage_N = torch.from_numpy(batch.advantage_N).to(device)
        weight_N = torch.from_numpy(batch.weight_N).to(device)
        logprob_N, entropy_N = token_logprobs(logits_NV, target_N, self.temperature)
        importance_N = torch.ones_like(engine_N)
        if self.algorithm.old_logprobs == "engine":
            old_N = engine_N
        else:
            old_N = logprob_N.detach()
            if self.algorithm.importance_cap is not None:
                importance_N = truncated_importance(old_N, engine_N, cap=self.algorithm.importance_cap)
        token = clipped_loss(
            logprob_N,
            old_N,
            advantage_N,
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
            dual_clip=self.algorithm.dual_clip,
        )
        loss = (token.loss_N * importance_N * weight_N).sum()
        counted_N = weight_N > 0
        gap_N = (logprob_N.detach() - engine_N).abs()

        def total(values_N: Tensor) -> float:
            return float(values_N[counted_N].double().sum())

        def largest(values_N: Tensor) -> float:
            return float(values_N[counted_N].max()) if bool(counted_N.any()) else 0.0

        return loss, StepSums(
            loss=float(loss.detach()),
            tokens=float(counted_N.sum()),
            clipped=total(token.clipped_N),
            importance=total(importance_N),
            gap=total(gap_N),
            entropy=total(entropy_N),
            advantage_abs=total(advantage_N.abs()),
            ratio_max=largest(token.ratio_N),
            gap_max=largest(gap_N),
        )


def token_logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets under softmax(logits / temperature), and the entropies (without gradient); float32."""
    scaled_NV = logits_NV.float() / temperature
    normaliser_N = torch.logsumexp(scaled_NV, dim=-1)
    chosen_N = scaled_NV.gather(-1, target_N[:, None]).squeeze(-1)
    with torch.no_grad():
        mean_N = (torch.exp(scaled_NV - normaliser_N[:, None]) * scaled_NV).sum(-1)
        entropy_N = normaliser_N - mean_N
    return chosen_N - normaliser_N, entropy_N
