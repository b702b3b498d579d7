"""Losses against hand-computed values and finite differences, and what all of them have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.policy_loss import TokenLoss, cispo_loss, clipped_loss, policy_gradient_loss, sequence_clipped_loss
from algorithms.sequences import sequence_mean

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
Loss = Callable[[Tensor, Tensor, Tensor], TokenLoss]
SEQUENCES = torch.tensor([0, 0, 1, 1, 1])


def gspo(logprob: Tensor, old: Tensor, advantage: Tensor, clip_low: float = 0.2, clip_high: float = 0.28) -> TokenLoss:
    """The first tokens of :data:`SEQUENCES`."""
    log_ratio = sequence_mean(logprob.detach() - old, SEQUENCES[: len(old)])
    return sequence_clipped_loss(logprob, log_ratio, advantage, clip_low=clip_low, clip_high=clip_high)


LOSSES: dict[str, Loss] = {
    "clip": partial(clipped_loss, **CLIP),  # type: ignore[arg-type]
    "gspo": gspo,
    "cispo": partial(cispo_loss, clip_high=1.5),
    "policy_gradient": lambda logprob, old, advantage: policy_gradient_loss(logprob, advantage),
}


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


def test_gspo_by_hand() -> None:
    # ratios 1.1 and 1.3 of a good sequence, 0.5, 0.8, 1 of a bad one; geometric means sqrt(1.43) and cbrt(0.4)
    logprob = torch.tensor([1.1, 1.3, 0.5, 0.8, 1.0], dtype=torch.float64).log()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    good, bad = math.sqrt(1.1 * 1.3), (0.5 * 0.8) ** (1 / 3)
    free = gspo(logprob, torch.zeros_like(logprob), advantage, clip_low=0.5, clip_high=0.5)
    torch.testing.assert_close(free.loss_N, torch.tensor([-good] * 2 + [bad] * 3, dtype=torch.float64))
    tight = gspo(logprob, torch.zeros_like(logprob), advantage, clip_low=0.1, clip_high=0.1)
    torch.testing.assert_close(tight.loss_N, torch.tensor([-1.1] * 2 + [0.9] * 3, dtype=torch.float64))
    assert tight.clipped_N.all()


def test_gspo_has_the_gradient_of_the_loss_of_whole_sequences() -> None:
    torch.manual_seed(0)
    old, advantage = torch.randn(5, dtype=torch.float64) - 2, torch.tensor([0.7, 0.7, -1.2, -1.2, -1.2]).double()
    logprob = (old + 0.1 * torch.randn(5, dtype=torch.float64)).requires_grad_()
    weight = torch.tensor([0.25, 0.25, 1 / 6, 1 / 6, 1 / 6]).double()  # sequence mean
    (found,) = torch.autograd.grad((gspo(logprob, old, advantage).loss_N * weight).sum(), logprob)
    ratio = [torch.exp((logprob - old)[SEQUENCES.eq(n)].mean()) for n in range(2)]
    whole = -(0.7 * ratio[0] - 1.2 * ratio[1]) / 2
    torch.testing.assert_close(found, torch.autograd.grad(whole, logprob)[0])


def test_cispo_by_hand() -> None:
    # weight min(r, 2.5) on -A log pi: the loss's value is no surrogate, its gradient is -A min(r, 2.5)
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = logprob.detach() - torch.tensor([2.0, 4.0]).double().log()
    found = cispo_loss(logprob, old, torch.tensor([1.5, -1.0]).double(), clip_high=1.5)
    torch.testing.assert_close(found.loss_N.detach(), torch.tensor([1.5 * 2 * 1.0, -2.5 * 2.0]).double())
    assert found.clipped_N.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), logprob)
    torch.testing.assert_close(gradient, torch.tensor([-1.5 * 2, 2.5]).double())


def test_policy_gradient_by_hand() -> None:
    found = policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0]))
    assert found.loss_N.tolist() == [3.0, -2.0]


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 1000))
def test_on_policy_every_loss_has_the_policy_gradient(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    advantage = torch.randn(5)
    logprob = (-torch.rand(5) * 3).requires_grad_()
    found = LOSSES[name](logprob, logprob.detach(), advantage)
    (gradient,) = torch.autograd.grad(found.loss_N.sum(), logprob)
    torch.testing.assert_close(gradient, -advantage)
    assert found.ratio_N.tolist() == [1.0] * 5
    assert not found.clipped_N.any()


@given(st.integers(0, 1000))
def test_gspo_s_ratio_is_the_same_in_all_of_a_sequence(seed: int) -> None:
    torch.manual_seed(seed)
    ratio = gspo(-torch.rand(5), -torch.rand(5), torch.randn(5)).ratio_N
    torch.testing.assert_close(ratio, sequence_mean(ratio, SEQUENCES))


@pytest.mark.parametrize("name", ["clip", "policy_gradient"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.3, 0.7, 0.95, 1.0, 1.1, 1.4, 2.5, 4.0])
def test_gradient_equals_finite_differences(ratio: float, advantage: float, name: str) -> None:
    old = torch.tensor([-1.3], dtype=torch.float64)
    advantage_N = torch.tensor([advantage], dtype=torch.float64)

    def loss(logprob: Tensor) -> Tensor:
        return LOSSES[name](logprob, old, advantage_N).loss_N.sum()

    logprob = (old + math.log(ratio)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logprob), logprob)
    h = 1e-6
    with torch.no_grad():
        difference = (loss(logprob + h) - loss(logprob - h)) / (2 * h)
    assert gradient.item() == pytest.approx(difference.item(), abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_old_logprobs_get_no_gradient(name: str) -> None:
    old = torch.tensor([-1.0], requires_grad=True)
    LOSSES[name](torch.tensor([-1.0], requires_grad=True), old, torch.ones(1)).loss_N.sum().backward()
    assert old.grad is None
