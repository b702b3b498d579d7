"""Ids, log-probs, stops and sampling."""

from __future__ import annotations

import pytest

from tests.contract.engines.driver import Bench
from tests.contract.engines.models import logprobs


async def test_a_generation_gives_its_tokens_with_log_probs_and_versions(bench: Bench) -> None:
    generation = await bench.generate(tokens=40)
    assert len(generation.ids) == 40
    assert generation.finish == "length"
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in generation.chunks)
    assert all(chunk.finish is None for chunk in generation.chunks[:-1])
    assert generation.versions == [0] * 40


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
async def test_log_probs_are_those_of_a_plain_forward_pass_at_the_temperature(bench: Bench, temperature: float) -> None:
    if not bench.can("policy"):
        pytest.skip("its tokens come from no model")
    generation = await bench.generate(tokens=60, temperature=temperature)
    expected = logprobs(bench.checkpoints.first, generation.prompt, generation.ids, temperature=temperature or 1.0)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)
