"""Ids, log-probs, chunks, stops and sampling."""

from __future__ import annotations

import pytest
import torch

from tests.contract.engines.driver import PROMPT, Bench, Generation
from tests.contract.engines.models import distributions, logprobs, text
from workers.engines.base import Sampling

NEAR = 1e-4
"""Largest difference of two float32 computations of one log-prob."""


def need(bench: Bench, ability: str) -> None:
    if not bench.can(ability):
        pytest.skip(f"{bench.rig.kind} does not have {ability}")


def rows_of(bench: Bench, generation: Generation) -> torch.Tensor:
    """[output, vocabulary] log-probs of a plain forward pass."""
    return distributions(bench.checkpoints.first, generation.prompt, generation.ids)


async def test_a_generation_gives_its_tokens_with_log_probs_and_versions(bench: Bench) -> None:
    generation = await bench.generate(tokens=40)
    assert len(generation.ids) == 40
    assert generation.finish == "length"
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in generation.chunks)
    assert all(chunk.finish is None for chunk in generation.chunks[:-1])
    assert generation.versions == [0] * 40


async def test_tokens_arrive_while_later_ones_are_still_made(bench: Bench) -> None:
    generation = await bench.running(tokens=600)
    await bench.engine.pause("in_place")
    assert 0 < len(generation.ids) < 600
    await bench.engine.resume()
    assert len((await generation.end()).ids) == 600
    assert len([chunk for chunk in generation.chunks if chunk.ids]) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
async def test_log_probs_are_those_of_a_plain_forward_pass_at_the_temperature(bench: Bench, temperature: float) -> None:
    need(bench, "policy")
    generation = await bench.generate(tokens=60, temperature=temperature)
    expected = logprobs(bench.checkpoints.first, generation.prompt, generation.ids, temperature=temperature or 1.0)
    assert generation.logprobs == pytest.approx(expected, abs=NEAR)


async def test_greedy_takes_the_likeliest_token(bench: Bench) -> None:
    need(bench, "policy")
    generation = await bench.generate(tokens=40, temperature=0.0)
    assert generation.ids == rows_of(bench, generation).argmax(-1).tolist()


async def test_top_k_draws_from_the_k_likeliest_and_leaves_log_probs_alone(bench: Bench) -> None:
    need(bench, "policy")
    generation = await bench.generate(tokens=80, top_k=3)
    rows = rows_of(bench, generation)
    best = rows.topk(3).indices.tolist()
    assert all(token in top for token, top in zip(generation.ids, best, strict=True))
    assert generation.ids != rows.argmax(-1).tolist()
    assert generation.logprobs == pytest.approx(logprobs(bench.checkpoints.first, PROMPT, generation.ids), abs=NEAR)


async def test_top_p_draws_from_the_smallest_set_that_has_the_mass(bench: Bench) -> None:
    need(bench, "policy")
    generation = await bench.generate(tokens=80, top_p=0.4)
    rows = rows_of(bench, generation).exp()
    for token, row in zip(generation.ids, rows, strict=True):
        likelier = row[row > row[token]].sum().item()
        assert likelier < 0.4 + NEAR
    assert generation.logprobs == pytest.approx(logprobs(bench.checkpoints.first, PROMPT, generation.ids), abs=NEAR)


async def test_min_p_leaves_out_what_is_far_less_likely_than_the_likeliest(bench: Bench) -> None:
    need(bench, "min_p")
    generation = await bench.generate(tokens=80, min_p=0.3)
    rows = rows_of(bench, generation).exp()
    shares = [(row[token] / row.max()).item() for token, row in zip(generation.ids, rows, strict=True)]
    assert min(shares) > 0.3 - NEAR
    assert min(shares) < 1


async def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(bench: Bench) -> None:
    need(bench, "seeds")
    first, again, other = [(await bench.generate(tokens=40, seed=seed)).ids for seed in (7, 7, 8)]
    assert first == again
    assert first != other


async def test_without_a_seed_two_generations_differ(bench: Bench) -> None:
    need(bench, "policy")
    first, second = [(await bench.generate(tokens=40, seed=None)).ids for _ in range(2)]
    assert first != second


async def test_a_stop_id_ends_a_generation_and_is_part_of_it(bench: Bench) -> None:
    greedy = await bench.generate(temperature=0.0, tokens=20)
    stop = greedy.ids[3]
    stopped = await bench.generate(temperature=0.0, tokens=20, stop_token_ids=(stop,))
    finish = stopped.chunks[-1].finish
    assert stopped.ids == greedy.ids[: greedy.ids.index(stop) + 1]
    assert finish is not None
    assert (finish.kind, finish.matched) == ("stop", stop)


async def test_a_stop_string_ends_a_generation_where_it_is_complete(bench: Bench) -> None:
    need(bench, "stop_strings")
    greedy = await bench.generate(temperature=0.0, tokens=20)
    stop = text(greedy.ids[4:6])
    stopped = await bench.generate(temperature=0.0, tokens=20, stop=(stop,))
    finish = stopped.chunks[-1].finish
    end = text(greedy.ids).index(stop) + len(stop)
    assert stopped.ids == greedy.ids[:end]
    assert finish is not None
    assert (finish.kind, finish.matched) == ("stop", stop)


async def test_a_bias_moves_the_distribution_and_its_log_probs(bench: Bench) -> None:
    need(bench, "logit_bias")
    bias = {5: 4.0, 9: -50.0}
    generation = await bench.generate(tokens=60, logit_bias=bias)
    assert len(generation.ids) == 60
    if bench.can("policy"):
        assert 9 not in generation.ids
        expected = logprobs(bench.checkpoints.first, PROMPT, generation.ids, bias=bias)
        assert generation.logprobs == pytest.approx(expected, abs=NEAR)


@pytest.mark.parametrize("wanted", [1, 5])
async def test_the_likeliest_tokens_come_with_each_token(bench: Bench, wanted: int) -> None:
    need(bench, "top_logprobs")
    generation = await bench.generate(tokens=30, top_logprobs=wanted)
    tops = [top for chunk in generation.chunks for top in chunk.tops]
    assert len(tops) == len(generation.ids) == 30
    for token, logprob, top in zip(generation.ids, generation.logprobs, tops, strict=True):
        values = [value for _, value in top]
        assert len(dict(top)) == wanted
        assert values == sorted(values, reverse=True)
        assert values[0] >= logprob - NEAR
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=NEAR)
    if bench.can("policy"):
        best = rows_of(bench, generation).topk(wanted)
        assert [[i for i, _ in top] for top in tops] == best.indices.tolist()
        flat = [value for top in tops for _, value in top]
        assert flat == pytest.approx(best.values.flatten().tolist(), abs=NEAR)


async def test_a_penalty_keeps_tokens_from_coming_again(bench: Bench) -> None:
    need(bench, "penalties")
    generation = await bench.generate(tokens=30, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(generation.ids) == 30
    if bench.can("policy"):
        free = await bench.generate(tokens=30, temperature=0.0)
        assert len(set(generation.ids)) > len(set(free.ids))


async def test_a_schema_holds_the_output_to_it(bench: Bench) -> None:
    need(bench, "grammar")
    generation = await bench.generate(tokens=30, json_schema='{"type": "string", "minLength": 200}')
    if bench.can("policy"):
        written = text(generation.ids)
        assert (written[0], written.count('"')) == ('"', 1)


async def test_a_cut_generation_continues_as_if_never_cut(bench: Bench) -> None:
    assert bench.engine.continuable(Sampling(max_new_tokens=8))
    whole = (await bench.generate(temperature=0.0, tokens=20)).ids
    rest = (await bench.generate(temperature=0.0, prompt=PROMPT + whole[:7], tokens=13)).ids
    assert rest == whole[7:]


@pytest.mark.parametrize(
    "features",
    [{"stop": ("x",)}, {"json_schema": "{}"}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}],
    ids=lambda features: next(iter(features)),
)
def test_what_depends_on_the_output_so_far_is_said_not_to_be_continuable(
    bench: Bench, features: dict[str, object]
) -> None:
    assert not bench.engine.continuable(Sampling(max_new_tokens=8, **features))  # type: ignore[arg-type]


async def test_thirty_two_requests_at_once_each_get_their_own_answer(bench: Bench) -> None:
    prompts = [[n, *PROMPT[: n % 8]] for n in range(32)]
    alone = [(await bench.generate(prompt=prompts[n], temperature=0.0)).ids for n in range(4)]
    generations = [bench.start(prompt=prompts[n], temperature=0.0) for n in range(32)]
    answers = [(await generation.end()).ids for generation in generations]
    assert [len(ids) for ids in answers] == [8] * 32
    assert answers[:4] == alone
