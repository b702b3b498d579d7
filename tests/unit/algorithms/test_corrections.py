"""Off-policy weights, KL estimates, value loss and aggregation: by hand, and what must hold for any tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms import kl
from algorithms.aggregation import Aggregation, aggregation_weights
from algorithms.corrections import Level, fresh, importance, mask_outside, truncate
from algorithms.sequences import sequence_sum
from algorithms.value_loss import explained_variance, value_loss

OLD = torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64).log()
ENGINE = torch.tensor([0.25, 0.4, 0.3], dtype=torch.float64).log()
SEQUENCE = torch.tensor([0, 0, 1])


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [2.0, 0.5, 3.0]), ("sequence", [1.0, 1.0, 3.0]), ("geometric", [1.0, 1.0, 3.0])],
)
def test_importance_by_hand(level: Level, expected: list[float]) -> None:
    found = importance(OLD.clone().requires_grad_(), ENGINE, level=level, sequence_N=SEQUENCE)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert not found.requires_grad


def test_a_sequence_s_weight_is_the_product_or_its_root() -> None:
    old, engine = torch.tensor([2.0, 8.0, 1.0]).log(), torch.zeros(3)
    same = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(importance(old, engine, level="sequence", sequence_N=same), torch.full((3,), 16.0))
    root = torch.full((3,), 16 ** (1 / 3))
    torch.testing.assert_close(importance(old, engine, level="geometric", sequence_N=same), root)


def test_a_level_of_sequences_needs_sequences() -> None:
    with pytest.raises(ValueError, match=r"which tokens make a sequence"):
        importance(OLD, ENGINE, level="sequence", sequence_N=None)


def test_truncation_cuts_and_masking_leaves_out() -> None:
    weight = torch.tensor([0.1, 0.5, 1.0, 5.0, 5.1])
    assert truncate(weight, cap=2.0).tolist() == pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0])
    assert mask_outside(weight, floor=0.5, cap=5.0).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]


def test_tokens_are_fresh_up_to_the_cap() -> None:
    assert fresh(torch.tensor([7, 6, 5, 0]), step=7, cap=1).tolist() == [True, True, False, False]


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 4)), min_size=1, max_size=20))
def test_sums_over_sequences_do_not_depend_on_the_order_of_tokens(tokens: list[tuple[float, int]]) -> None:
    value, sequence = torch.tensor([v for v, _ in tokens], dtype=torch.float64), torch.tensor([s for _, s in tokens])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sequence_sum(value, sequence)[order], sequence_sum(value[order], sequence[order]))


def test_kl_estimates_by_hand() -> None:
    logprob, reference = torch.tensor([0.5, 0.2]).double().log(), torch.tensor([0.25, 0.4]).double().log()
    log2 = math.log(2)
    torch.testing.assert_close(kl.k1(logprob, reference), torch.tensor([log2, -log2]).double())
    torch.testing.assert_close(kl.k2(logprob, reference), torch.tensor([log2**2 / 2] * 2).double())
    torch.testing.assert_close(kl.k3(logprob, reference), torch.tensor([0.5 - 1 + log2, 2 - 1 - log2]).double())


def _policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy with a gradient, log-probs of a reference near it."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64)
    return logits.clone().requires_grad_(), torch.log_softmax(logits + 0.3 * torch.randn(6).double(), -1)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    logits, reference = _policies()
    logprob = torch.log_softmax(logits, -1)
    expected = (logprob.exp() * (logprob - reference)).sum()
    torch.testing.assert_close((logprob.exp() * kl.ESTIMATORS[name](logprob, reference)).sum(), expected)


def test_as_a_loss_k2_has_the_kl_s_gradient_and_k1_none() -> None:
    logits, reference = _policies()
    logprob = torch.log_softmax(logits, -1)
    sampled = logprob.exp().detach()  # tokens come as often as the policy samples them; the sampling has no gradient
    (exact,) = torch.autograd.grad((logprob.exp() * (logprob - reference)).sum(), logits, retain_graph=True)
    (by_k2,) = torch.autograd.grad((sampled * kl.k2(logprob, reference)).sum(), logits, retain_graph=True)
    (by_k1,) = torch.autograd.grad((sampled * kl.k1(logprob, reference)).sum(), logits)
    torch.testing.assert_close(by_k2, exact)
    torch.testing.assert_close(by_k1, torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("value", "clip", "loss"),
    [
        (1.0, None, 0.5),  # (1 - 2)^2 / 2
        (1.0, 0.5, 1.125),  # moved from 0 by 1, counts as 0.5: (0.5 - 2)^2 / 2
        (0.3, 0.5, 1.445),
        (-1.0, 0.5, 4.5),  # the wrong way: the larger loss, so it is pulled back
    ],
)
def test_value_loss_by_hand(value: float, clip: float | None, loss: float) -> None:
    found = value_loss(torch.tensor([value]), torch.zeros(1), torch.tensor([2.0]), clip=clip)
    assert found.item() == pytest.approx(loss)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_token_mean_counts_each_token_the_same() -> None:
    found = aggregation_weights(torch.tensor([1, 3, 0]), aggregation="token_mean")
    torch.testing.assert_close(found, torch.tensor([0.25, 0.25, 0.0]))


def test_sequence_mean_counts_each_session_with_tokens_the_same() -> None:
    tokens = torch.tensor([1, 4, 0])
    found = aggregation_weights(tokens, aggregation="sequence_mean")
    torch.testing.assert_close(found, torch.tensor([0.5, 0.125, 0.0]))
    assert float((found * tokens).sum()) == pytest.approx(1.0)


def test_a_fixed_length_weighs_tokens_alike_whatever_the_lengths() -> None:
    found = aggregation_weights(torch.tensor([1, 4, 0]), aggregation="fixed_length", length=10)
    torch.testing.assert_close(found, torch.tensor([0.05, 0.05, 0.0]))
    with pytest.raises(ValueError, match=r"needs a length"):
        aggregation_weights(torch.tensor([1]), aggregation="fixed_length")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_nothing_to_train_gives_weights_of_zero(aggregation: Aggregation) -> None:
    assert aggregation_weights(torch.tensor([0, 0]), aggregation=aggregation, length=5).tolist() == [0.0, 0.0]
