"""Returns and GAE over trees: by hand, equal to the textbook on a chain, indifferent to how leaves are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.credit import at_turns, leaves, tree_advantages, tree_returns


def ones(like: Tensor) -> Tensor:
    return torch.ones(len(like), dtype=torch.float64)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def textbook_gae(reward: Tensor, value: Tensor, discount: float, decay: float) -> Tensor:
    """Equation 16 of arXiv 1506.02438 as a double sum."""
    after = torch.cat([value[1:], torch.zeros(1, dtype=value.dtype)])
    delta = reward + discount * after - value
    steps = range(len(reward))
    return torch.stack([sum((discount * decay) ** (k - t) * delta[k] for k in steps if k >= t) for t in steps])  # type: ignore[misc]


@given(st.integers(1, 12), st.integers(0, 1000), st.floats(0.1, 1), st.floats(0, 1))
def test_on_a_chain_it_is_the_textbook_s_gae(length: int, seed: int, discount: float, decay: float) -> None:
    torch.manual_seed(seed)
    reward, value = torch.randn(2, length, dtype=torch.float64)
    parent = torch.arange(length) - 1
    found = tree_advantages(reward, value, parent, ones(parent), discount * ones(parent), decay * ones(parent))
    expected = textbook_gae(reward, value, discount, decay)
    torch.testing.assert_close(found.advantage_N, expected.float())
    torch.testing.assert_close(found.return_N, (expected + value).float())


def test_a_branch_counts_by_the_loss_weight_behind_it() -> None:
    # token 0 branches into 1 -> 2 (weights 1 + 1) and 3 (weight 2): half and half
    parent = torch.tensor([-1, 0, 1, 0])
    reward, value = floats(0, 0, 1, 3), floats(0.5, 0.4, 0.6, 2)
    found = tree_advantages(reward, value, parent, floats(1, 1, 1, 2), 0.9 * ones(parent), 0.5 * ones(parent))
    a2, a3 = 1 - 0.6, 3 - 2
    a1 = 0.9 * 0.6 - 0.4 + 0.45 * a2
    a0 = 0.5 * 0.9 * 0.4 + 0.5 * 0.9 * 2 - 0.5 + 0.5 * 0.45 * a1 + 0.5 * 0.45 * a3
    torch.testing.assert_close(found.advantage_N, floats(a0, a1, a2, a3).float())


def test_a_branch_without_loss_weight_counts_for_nothing_unless_all_are() -> None:
    parent = torch.tensor([-1, 0, 0])
    reward = floats(0, 1, 5)
    assert tree_returns(reward, parent, floats(1, 1, 0), ones(parent)).tolist() == [1, 1, 5]
    assert tree_returns(reward, parent, floats(1, 0, 0), ones(parent)).tolist() == [3, 1, 5]


@given(st.integers(0, 1000), st.integers(2, 20))
def test_the_same_reward_at_all_leaves_is_every_token_s_return(seed: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parent = torch.tensor([-1, *(int(torch.randint(n, (1,), generator=generator)) for n in range(1, tokens))])
    weight = torch.rand(tokens, generator=generator, dtype=torch.float64)
    found = tree_returns(torch.where(leaves(parent), 2.0, 0.0).double(), parent, weight, ones(parent))
    torch.testing.assert_close(found, torch.full((tokens,), 2.0))


def test_a_discount_per_turn_acts_once_between_two_answers_however_long() -> None:
    parent, turn = torch.tensor([-1, 0, 1, 2, 3]), torch.tensor([0, 0, 0, 1, 1])
    found = tree_returns(floats(0, 0, 0, 0, 1), parent, ones(parent), at_turns(0.5, turn, parent))
    assert found.tolist() == [0.5, 0.5, 0.5, 1, 1]


def test_values_of_parallel_sessions_do_not_mix() -> None:
    parent = torch.tensor([-1, 0, -1, 2])
    found = tree_returns(floats(0, 1, 0, 7), parent, ones(parent), ones(parent))
    assert found.tolist() == [1, 1, 7, 7]


def test_a_parent_behind_its_child_is_refused() -> None:
    parent = torch.tensor([1, -1])
    with pytest.raises(ValueError, match=r"in front of its children"):
        tree_returns(floats(0, 1), parent, ones(parent), ones(parent))
