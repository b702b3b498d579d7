"""Losses against hand-computed values and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from algorithms.policy_loss import aggregation_weights, clipped_loss, truncated_importance

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def _loss(ratio: float, advantage: float, **changes: float | None) -> tuple[float, bool]:
    settings = {**CLIP, **changes}
    zero = torch.zeros(1, dtype=torch.float64)
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64)
    found = clipped_loss(logprob, zero, torch.tensor([advantage], dtype=torch.float64), **settings)  # type: ignore[arg-type]
    assert found.ratio_N.item() == pytest.approx(ratio)
    return found.loss_N.item(), bool(found.clipped_N.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 2.0, -2.4, False),  # inside the upper bound
        (1.5, 2.0, -2.56, True),  # good token, already made likelier by more than 28 %
        (0.5, 2.0, -1.0, False),  # good token that became unlikely: pulled back
        (0.9, -2.0, 1.8, False),
        (0.5, -2.0, 1.6, True),  # bad token, already made unlikelier by more than 20 %
        (2.0, -2.0, 4.0, False),
        (5.0, -2.0, 6.0, True),  # bad token, far likelier: bounded by the dual clip at 3 x 2
        (5.0, 0.0, 0.0, False),
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    found, was_clipped = _loss(ratio, advantage)
    assert found == pytest.approx(loss)
    assert was_clipped is clipped


def test_without_dual_clip_a_negative_advantage_has_no_bound() -> None:
    assert _loss(5.0, -2.0, dual_clip=None) == (pytest.approx(10.0), False)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.3, 0.7, 0.95, 1.0, 1.1, 1.4, 2.5, 4.0])
def test_gradient_equals_finite_differences(ratio: float, advantage: float) -> None:
    old = torch.tensor([-1.3], dtype=torch.float64)
    advantage_N = torch.tensor([advantage], dtype=torch.float64)

    def loss(logprob: Tensor) -> Tensor:
        return clipped_loss(logprob, old, advantage_N, **CLIP).loss_N.sum()  # type: ignore[arg-type]

    logprob = (old + math.log(ratio)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logprob), logprob)
    h = 1e-6
    with torch.no_grad():
        difference = (loss(logprob + h) - loss(logprob - h)) / (2 * h)
    assert gradient.item() == pytest.approx(difference.item(), abs=1e-7)


def test_old_logprobs_get_no_gradient() -> None:
    old = torch.tensor([-1.0], requires_grad=True)
    found = clipped_loss(torch.tensor([-1.0], requires_grad=True), old, torch.ones(1), **CLIP)  # type: ignore[arg-type]
    found.loss_N.sum().backward()
    assert old.grad is None


def test_truncated_importance_by_hand() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0, -0.5, -4.0])
    found = truncated_importance(old, engine, cap=2.0)
    torch.testing.assert_close(found, torch.tensor([1.0, math.exp(-0.5), 2.0]))
    assert not found.requires_grad


def test_token_mean_counts_each_token_the_same() -> None:
    found = aggregation_weights(torch.tensor([1, 3, 0]), aggregation="token_mean")
    torch.testing.assert_close(found, torch.tensor([0.25, 0.25, 0.0]))


def test_sequence_mean_counts_each_session_with_tokens_the_same() -> None:
    tokens = torch.tensor([1, 4, 0])
    found = aggregation_weights(tokens, aggregation="sequence_mean")
    torch.testing.assert_close(found, torch.tensor([0.5, 0.125, 0.0]))
    assert float((found * tokens).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_nothing_to_train_gives_weights_of_zero(aggregation: str) -> None:
    found = aggregation_weights(torch.tensor([0, 0]), aggregation=aggregation)  # type: ignore[arg-type]
    assert found.tolist() == [0.0, 0.0]
