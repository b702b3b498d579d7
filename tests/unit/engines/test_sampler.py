"""Sampling follows the distribution it is asked for, and log-probs are those of the whole of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from workers.engines.embedded.sampler import Draw, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
N = 4000


def sampled(*arguments: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probs."""
    rows = sample(*arguments)
    return [row.token for row in rows], [row.logprob for row in rows]


def draws(n: int = N, **options: Any) -> list[Draw]:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **options}
    return [Draw(**values, uniform=(i + 0.5) / n) for i in range(n)]


def shares(tokens: list[int]) -> dict[int, float]:
    return {token: count / len(tokens) for token, count in Counter(tokens).items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_evenly_spread_draws_give_each_token_its_probability(temperature: float) -> None:
    probabilities = torch.softmax(LOGITS / temperature, -1).tolist()
    tokens, logprobs = sampled(LOGITS.repeat(N, 1), draws(temperature=temperature))
    for token, share in shares(tokens).items():
        assert share == pytest.approx(probabilities[token], abs=2 / N)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, {0, 1}),
    ],
)
def test_filters_choose_among_the_likeliest_and_leave_log_probs_alone(options: Any, kept: set[int]) -> None:
    probabilities = torch.softmax(LOGITS, -1)
    tokens, logprobs = sampled(LOGITS.repeat(N, 1), draws(**options))
    total = float(probabilities[list(kept)].sum())
    assert {token for token, share in shares(tokens).items() if share > 0} == kept
    for token, share in shares(tokens).items():
        assert share == pytest.approx(float(probabilities[token]) / total, abs=2 / N)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(float(probabilities[token].log()), abs=1e-5)


def test_greedy_rows_take_the_likeliest_beside_rows_that_sample() -> None:
    rows = [*draws(10, temperature=0.0), *draws(10, temperature=1.0)]
    tokens, logprobs = sampled(LOGITS.repeat(20, 1), rows)
    assert tokens[:10] == [0] * 10
    assert len(set(tokens[10:])) > 1
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[0]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_have_the_log_probs_of_the_whole_distribution(temperature: float) -> None:
    logprobs = torch.log_softmax(LOGITS / (temperature or 1.0), -1).tolist()
    rows = sample(LOGITS.repeat(3, 1), [Draw(temperature, 0.6, -1, 0.0, 0.1, top=top) for top in (0, 2, 9)])
    assert [[token for token, _ in row.top] for row in rows] == [[], [0, 1], [0, 1, 2, 3, 4]]
    for row in rows:
        assert [value for _, value in row.top] == pytest.approx([logprobs[token] for token, _ in row.top], abs=1e-5)


def test_a_bias_is_added_to_the_logits_of_its_row_only() -> None:
    changed = LOGITS + torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0])
    rows = sample(LOGITS.repeat(2, 1), [Draw(0.0, 1.0, -1, 0.0, 0.0, bias) for bias in ({3: 5.0}, {})])
    assert [row.token for row in rows] == [3, 0]
    assert rows[0].logprob == pytest.approx(float(torch.log_softmax(changed, -1)[3]), abs=1e-5)
    assert rows[1].logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[0]), abs=1e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((2, 8), -math.inf)
    logits[:, 3] = 0.0
    extremes = [Draw(1.0, 1.0, -1, 0.0, value) for value in (0.0, 1 - 2**-24)]
    assert sampled(logits, extremes) == ([3, 3], [0.0, 0.0])


def test_uniform_numbers_depend_on_seed_and_position_and_fill_the_unit_interval() -> None:
    values = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) > 3990
    for low in (0.0, 0.25, 0.5, 0.75):
        assert 900 < sum(low <= value < low + 0.25 for value in values) < 1100
    assert uniform(-5, 3) == uniform(-5, 3)
    assert uniform(2**70 + 1, 3) == uniform(1, 3)
