"""The loss of one micro-batch, and the sums from which a step's metrics are made. Knows no back end.

Shape suffixes: ``N`` trained tokens of the micro-batch, ``V`` vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms import kl
from algorithms.corrections import importance, mask_outside, truncate
from algorithms.policy_loss import (
    PolicyTokens,
    TokenLoss,
    cispo_loss,
    clipped_loss,
    policy_gradient_loss,
    sequence_clipped_loss,
)
from algorithms.value_loss import value_loss
from storage.errors import ConfigError
from workers.trainer.distributions import NO_BINS, bins
from workers.trainer.packing import MicroBatch
from workers.trainer.usercode import call
from workflows.spec import AlgorithmSpec


@dataclass
class StepSums:
    """Sums and maxima over trained tokens; additive over micro-batches and ranks."""

    loss: float = 0.0
    tokens: float = 0.0
    clipped: float = 0.0
    importance: float = 0.0
    masked: float = 0.0
    gap: float = 0.0
    """|trainer - engine| log-prob of tokens that the weights before the batch had sampled."""
    current: float = 0.0
    """How many these are."""
    stale_ratio: float = 0.0
    """exp(trainer - engine) of tokens of other weights."""
    stale: float = 0.0
    """How many these are."""
    entropy: float = 0.0
    kl: float = 0.0
    advantage_abs: float = 0.0
    importance_bins: npt.NDArray[np.int64] = field(default_factory=NO_BINS.copy, compare=False)
    """Tokens by exp(trainer - engine) log-prob, before the batch's first optimizer step."""
    ratio_max: float = field(default=0.0, metadata={"merge": max})
    gap_max: float = field(default=0.0, metadata={"merge": max})
    broken: frozenset[int] = field(default=frozenset(), metadata={"merge": operator.or_})
    """Tokens of the batch whose loss, or its gradient by their log-prob, is no finite number."""

    @property
    def finite(self) -> bool:
        """Whether an optimizer step can be made on this loss."""
        return math.isfinite(self.loss) and not self.broken

    def add(self, other: StepSums) -> None:
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, f.metadata.get("merge", operator.add)(mine, theirs))

    def mean(self, name: str, over: str = "tokens") -> float:
        """Per trained token, or per token of the count ``over``; 0 if there is none."""
        count = float(getattr(self, over))
        return float(getattr(self, name)) / count if count else 0.0


@dataclass(frozen=True)
class Objective:
    """The run's policy loss."""

    algorithm: AlgorithmSpec
    temperature: float
    """Of the sampling policy: what it sampled from is softmax(logits / temperature)."""
    step: int = 0
    """Weight version before the batch."""
    first: bool = True
    """Whether the weights are still those, so that what they say of a token can be set against what its engine said."""

    def __call__(self, logits_NV: Tensor, batch: MicroBatch) -> tuple[Tensor, StepSums]:
        """This micro-batch's part of the batch loss (differentiable), and its sums.

        Without ``old_logprob_N`` the weights that compute ``logits_NV`` are those before the batch's first optimizer
        step: the recomputed old log-probs *are* the current ones without gradient.
        """
        algorithm, device = self.algorithm, logits_NV.device
        target_N, engine_N, weight_N = (
            _on(device, a) for a in (batch.target_N, batch.engine_logprob_N, batch.weight_N)
        )
        bonus = algorithm.entropy_coefficient
        logprob_N, entropy_N = token_logprobs(logits_NV, target_N, self.temperature, differentiable_entropy=bonus > 0)
        tokens = self._tokens(batch, logprob_N, engine_N)
        token = _LOSSES.get(algorithm.loss_used, _users)(tokens, algorithm)
        importance_N = self._importance(batch, tokens.old_logprob_N, engine_N)
        reference_N = (
            logprob_N.detach() if batch.reference_logprob_N is None else _on(device, batch.reference_logprob_N)
        )
        loss_N = token.loss_N * importance_N - bonus * entropy_N
        if algorithm.kl != "none" and algorithm.kl_in == "loss":
            loss_N = loss_N + (algorithm.kl_coefficient or 0.0) * kl.ESTIMATORS[algorithm.kl](logprob_N, reference_N)
        loss = (loss_N * weight_N).sum()
        return loss, _sums(
            loss,
            weight_N > 0,
            **self._mismatch(batch, logprob_N.detach(), engine_N),
            clipped=token.clipped_N,
            importance=importance_N,
            masked=importance_N == 0,
            entropy=entropy_N.detach(),
            kl=kl.k3(logprob_N.detach(), reference_N),
            advantage_abs=tokens.advantage_N.abs(),
            ratio=token.ratio_N,
            broken=_broken(batch, loss, loss_N, logprob_N),
        )

    def _tokens(self, batch: MicroBatch, logprob_N: Tensor, engine_N: Tensor) -> PolicyTokens:
        device = logprob_N.device
        if self.algorithm.old_logprobs == "engine":
            old_N = engine_N
        else:
            old_N = logprob_N.detach() if batch.old_logprob_N is None else _on(device, batch.old_logprob_N)
        sequence_N = batch.sequence_log_ratio_N
        return PolicyTokens(
            logprob_N=logprob_N,
            old_logprob_N=old_N,
            engine_logprob_N=engine_N,
            advantage_N=_on(device, batch.advantage_N),
            sequence_log_ratio_N=torch.zeros_like(engine_N) if sequence_N is None else _on(device, sequence_N),
            staleness_N=self.step - _on(device, batch.version_N).long(),
        )

    def _mismatch(self, batch: MicroBatch, logprob_N: Tensor, engine_N: Tensor) -> dict[str, Tensor]:
        """Engine against trainer under equal weights, and apart from it what the change of weights did.

        A token of version v is held against the trainer's weights of v only: those before the batch's first optimizer
        step, if v is the batch's version.
        """
        before_N = logprob_N if batch.old_logprob_N is None else _on(logprob_N.device, batch.old_logprob_N)
        known = batch.old_logprob_N is not None or self.first
        current = batch.version_N == self.step if batch.current_N is None else batch.current_N
        current_N = _on(logprob_N.device, current)
        difference_N, nothing_N = before_N - engine_N, torch.zeros_like(engine_N)
        return {
            "difference": difference_N if known else torch.full_like(engine_N, torch.nan),
            "gap": torch.where(current_N & known, difference_N.abs(), nothing_N),
            "current": current_N & known,
            "stale_ratio": torch.where(~current_N & known, difference_N.exp(), nothing_N),
            "stale": ~current_N & known,
        }

    def _importance(self, batch: MicroBatch, old_N: Tensor, engine_N: Tensor) -> Tensor:
        if batch.importance_N is not None:
            return _on(engine_N.device, batch.importance_N)
        return correction(self.algorithm, old_N, engine_N, None)


@dataclass(frozen=True)
class ValueObjective:
    """The loss of the critic."""

    algorithm: AlgorithmSpec

    def __call__(self, value_N: Tensor, batch: MicroBatch) -> Tensor:
        """This micro-batch's part of the batch loss; differentiable."""
        if batch.value_N is None or batch.return_N is None:
            raise ValueError("the critic is trained on micro-batches with values and returns")
        old_N, return_N = _on(value_N.device, batch.value_N), _on(value_N.device, batch.return_N)
        loss_N = value_loss(value_N.float(), old_N, return_N, clip=self.algorithm.value_clip)
        return (loss_N * _on(value_N.device, batch.weight_N)).sum()


def correction(algorithm: AlgorithmSpec, old_N: Tensor, engine_N: Tensor, sequence_N: Tensor | None) -> Tensor:
    """The off-policy weight of each token; ``sequence_N`` is needed where it is that of a whole sequence."""
    kind = algorithm.correction_used
    if kind == "none":
        return torch.ones_like(engine_N)
    ratio_N = importance(old_N, engine_N, level=algorithm.correction_level, sequence_N=sequence_N)
    if kind == "truncate":
        return truncate(ratio_N, cap=algorithm.bound("correction_cap"))
    return mask_outside(ratio_N, floor=algorithm.bound("correction_floor"), cap=algorithm.bound("correction_cap"))


def token_logprobs(
    logits_NV: Tensor, target_N: Tensor, temperature: float, *, differentiable_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets under softmax(logits / temperature), and the entropies in nats; float32."""
    scaled_NV = logits_NV.float() / temperature
    normaliser_N = torch.logsumexp(scaled_NV, dim=-1)
    chosen_N = scaled_NV.gather(-1, target_N[:, None]).squeeze(-1)
    with torch.set_grad_enabled(differentiable_entropy and torch.is_grad_enabled()):
        mean_N = (torch.exp(scaled_NV - normaliser_N[:, None]) * scaled_NV).sum(-1)
        entropy_N = normaliser_N - mean_N
    return chosen_N - normaliser_N, entropy_N


def _clip(tokens: PolicyTokens, algorithm: AlgorithmSpec) -> TokenLoss:
    return clipped_loss(
        tokens.logprob_N,
        tokens.old_logprob_N,
        tokens.advantage_N,
        clip_low=algorithm.bound("clip_low"),
        clip_high=algorithm.bound("clip_high"),
        dual_clip=algorithm.bound("dual_clip"),
    )


def _gspo(tokens: PolicyTokens, algorithm: AlgorithmSpec) -> TokenLoss:
    return sequence_clipped_loss(
        tokens.logprob_N,
        tokens.sequence_log_ratio_N,
        tokens.advantage_N,
        clip_low=algorithm.bound("clip_low"),
        clip_high=algorithm.bound("clip_high"),
    )


def _cispo(tokens: PolicyTokens, algorithm: AlgorithmSpec) -> TokenLoss:
    clip_high = algorithm.bound("clip_high")
    return cispo_loss(tokens.logprob_N, tokens.old_logprob_N, tokens.advantage_N, clip_high=clip_high)


def _policy_gradient(tokens: PolicyTokens, algorithm: AlgorithmSpec) -> TokenLoss:
    return policy_gradient_loss(tokens.logprob_N, tokens.advantage_N)


_LOSSES: dict[str, Callable[[PolicyTokens, AlgorithmSpec], TokenLoss]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "policy_gradient": _policy_gradient,
}


def _users(tokens: PolicyTokens, algorithm: AlgorithmSpec) -> TokenLoss:
    loss_N = call(algorithm.loss_used, tokens)
    if not isinstance(loss_N, Tensor) or loss_N.shape != tokens.logprob_N.shape or not loss_N.requires_grad:
        raise ConfigError(
            f"algorithm.loss {algorithm.loss_used} must give a differentiable Tensor of shape "
            f"{tuple(tokens.logprob_N.shape)}, it gave {loss_N}"
        )
    ratio_N = torch.exp(tokens.logprob_N.detach() - tokens.old_logprob_N)
    return TokenLoss(loss_N, ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def _broken(batch: MicroBatch, loss: Tensor, loss_N: Tensor, logprob_N: Tensor) -> frozenset[int]:
    """Tokens at which a number is not finite. Costs no pass through the model: the gradient ends at the log-probs."""
    finite_N = loss_N.detach().isfinite() & logprob_N.detach().isfinite()
    if loss.requires_grad and logprob_N.requires_grad:
        (gradient_N,) = torch.autograd.grad(loss, logprob_N, retain_graph=True, allow_unused=True)
        finite_N &= torch.ones_like(finite_N) if gradient_N is None else gradient_N.square().isfinite()  # as norms are
    return frozenset(batch.token_N[~finite_N.cpu().numpy()].tolist())


def _sums(
    loss: Tensor,
    counted_N: Tensor,
    *,
    ratio: Tensor,
    difference: Tensor,
    broken: frozenset[int],
    **values: Tensor,
) -> StepSums:
    """Over the tokens that count; a key of ``values`` is the sum it goes to. ``difference`` may be NaN: not known."""
    some = bool(counted_N.any())
    known_N = counted_N & ~difference.isnan()
    return StepSums(
        loss=float(loss.detach()),
        tokens=float(counted_N.sum()),
        **{name: float(value_N[counted_N].double().sum()) for name, value_N in values.items()},
        importance_bins=bins(difference[known_N].cpu().numpy()),
        ratio_max=float(ratio[counted_N].max()) if some else 0.0,
        gap_max=float(values["gap"][counted_N].max()) if some else 0.0,
        broken=broken,
    )


def _on(device: torch.device, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(device)
