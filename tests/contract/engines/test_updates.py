"""New weights: under running requests, refused ones, the cache of the old ones."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from storage.errors import EngineRejected
from storage.weights import folder_digest
from tests.contract.engines.driver import LONG, PROMPT, Bench, Checkpoints, Generation
from tests.contract.engines.models import logprobs
from tests.contract.engines.test_generation import NEAR, need
from workers.engines.base import PauseMode


async def test_an_update_is_confirmed_by_version_and_digest(bench: Bench) -> None:
    loaded = await bench.load(bench.checkpoints.second, 1)
    assert (loaded.version, loaded.checksum) == (1, folder_digest(bench.checkpoints.second))
    info = await bench.engine.info()
    assert (info.model_path, info.weight_version) == (str(bench.checkpoints.second), 1)
    assert (await bench.generate()).versions == [1] * 8


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_weights_change_under_a_running_request_and_each_token_knows_its_version(
    bench: Bench, mode: PauseMode
) -> None:
    need(bench, f"pause_{mode}")
    generation = await bench.running()
    await generation.reach(20)
    await bench.engine.pause(mode)
    await bench.load(bench.checkpoints.second, 1)
    await bench.engine.resume()
    await generation.reach(len(generation.ids) + 60)
    await bench.engine.abort(generation.rid)
    await generation.end()
    assert len(generation.ids) == len(generation.versions) > 80
    assert generation.versions == sorted(generation.versions, key=lambda version: version or 0)
    assert set(generation.versions) == {0, 1}
    if bench.can("policy"):
        _check_boundary(bench, generation)
        if mode == "retract":  # the KV is of the new weights too, so every token after the change is theirs alone
            _check_every_token(generation, {0: bench.checkpoints.first, 1: bench.checkpoints.second})


def _check_boundary(bench: Bench, generation: Generation) -> None:
    """Tokens said to be of the old weights have their log-probs; the first of the new ones has not."""
    old = logprobs(bench.checkpoints.first, PROMPT, generation.ids)
    change = generation.versions.index(1)
    assert generation.logprobs[:change] == pytest.approx(old[:change], abs=NEAR)
    assert abs(generation.logprobs[change] - old[change]) > NEAR


def _check_every_token(generation: Generation, weights: dict[int, Path]) -> None:
    """Its log-prob is that of a plain forward pass of the weights it is said to be of."""
    by_path = {path: logprobs(path, generation.prompt, generation.ids) for path in set(weights.values())}
    expected = [by_path[weights[version or 0]][at] for at, version in enumerate(generation.versions)]
    assert generation.logprobs == pytest.approx(expected, abs=NEAR)


async def test_unpaused_an_update_waits_or_lands_between_two_tokens(bench: Bench) -> None:
    generation = await bench.running(tokens=300)
    await bench.load(bench.checkpoints.second, 1)
    await generation.end()
    assert generation.finish == "length"
    assert len(generation.versions) == 300
    assert generation.versions[0] == 0
    if not bench.can("update_lands_at_once"):
        assert generation.versions == [0] * 300
    assert (await bench.generate()).versions == [1] * 8


async def test_after_an_update_log_probs_are_those_of_a_fresh_server(bench: Bench, tmp_path: Path) -> None:
    need(bench, "policy")
    before = await bench.generate(tokens=40, temperature=0.0)
    await bench.load(bench.checkpoints.second, 1)
    updated = await bench.generate(tokens=40, temperature=0.0)
    with bench.rig.start(bench.checkpoints.second, tmp_path) as process:
        fresh = bench.rig.connect(process.url)
        chunks = [
            chunk async for chunk in fresh.generate(PROMPT, updated.sampling, request_id=updated.rid, salt="fresh")
        ]
        await fresh.close()
    assert updated.ids == [i for chunk in chunks for i in chunk.ids] != before.ids
    assert updated.logprobs == pytest.approx([value for chunk in chunks for value in chunk.logprobs], abs=1e-5)


async def test_a_prompt_that_is_cached_is_read_anew_by_new_weights(bench: Bench) -> None:
    need(bench, "policy")
    prompt = [n % 60 for n in range(200)]
    for version, path in ((None, bench.checkpoints.first), (1, bench.checkpoints.second), (2, bench.checkpoints.first)):
        if version is not None:
            await bench.load(path, version)
        for _ in range(2):
            generation = await bench.generate(prompt=prompt, tokens=20)
            assert generation.logprobs == pytest.approx(logprobs(path, prompt, generation.ids), abs=NEAR)


async def test_a_version_that_is_made_again_with_other_weights_uses_nothing_of_the_first(bench: Bench) -> None:
    need(bench, "policy")
    prompt = [n % 60 for n in range(200)]
    for path in (bench.checkpoints.first, bench.checkpoints.second, bench.checkpoints.first):
        await bench.load(path, 1)
        generation = await bench.generate(prompt=prompt, tokens=20)
        assert generation.logprobs == pytest.approx(logprobs(path, prompt, generation.ids), abs=NEAR)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_sixteen_long_requests_live_through_twenty_updates(bench: Bench, mode: PauseMode) -> None:
    need(bench, f"pause_{mode}")
    paths = (bench.checkpoints.first, bench.checkpoints.second)
    generations = [bench.start(tokens=LONG, prompt=[n, *PROMPT]) for n in range(16)]
    for version in range(1, 21):
        await _each_grows(generations)
        await bench.engine.pause(mode)
        await bench.load(paths[version % 2], version)
        await bench.engine.resume()
    await _each_grows(generations, 5)
    await bench.engine.abort(None)
    seen: set[int] = set()
    for generation in generations:
        await generation.end()
        versions = [version if version is not None else -1 for version in generation.versions]
        assert generation.finish == "abort"
        assert len(generation.ids) == len(generation.logprobs) == len(versions)
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (0, 20)
        seen.update(versions)
        if bench.can("policy") and mode == "retract":
            _check_every_token(generation, {version: paths[version % 2] for version in range(21)})
    assert seen == set(range(21))


async def _each_grows(generations: list[Generation], tokens: int = 1) -> None:
    await asyncio.gather(*(generation.reach(len(generation.ids) + tokens) for generation in generations))


Spoil = Callable[[Path], None]


def _missing(folder: Path) -> None:
    shutil.rmtree(folder)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})

    return spoil


def _configured(**values: object) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_bytes(orjson.dumps({**orjson.loads(file.read_bytes()), **values}))

    return spoil


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, Spoil] = {
    "missing": _missing,
    "without weights": _no_weights,
    "no safetensors": _garbage,
    "truncated": _truncated,
    "a tensor is missing": _changed(lambda tensors: tensors.pop(NORM)),
    "a tensor too many": _changed(lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)})),
    "another shape": _changed(lambda tensors: tensors.update({NORM: torch.ones(32)})),
    "not a number": _changed(lambda tensors: tensors[NORM].fill_(float("nan"))),
    "other heads": _configured(num_attention_heads=2, head_dim=32),
    "another architecture": _configured(architectures=["LlamaForCausalLM"], model_type="llama"),
}
READABLE = {
    "a tensor is missing",
    "a tensor too many",
    "another shape",
    "not a number",
    "other heads",
    "another architecture",
}
"""A reader of safetensors finds nothing wrong with them."""


@pytest.mark.parametrize("how", BROKEN)
async def test_a_checkpoint_that_does_not_fit_is_refused_and_the_old_weights_stay(
    bench: Bench, how: str, tmp_path: Path
) -> None:
    if how in READABLE:
        need(bench, "checks_weights")
    folder = tmp_path / "checkpoint"
    shutil.copytree(bench.checkpoints.second, folder)
    BROKEN[how](folder)
    generation = await bench.running(tokens=100)
    with pytest.raises(EngineRejected, match=str(folder)):
        await bench.engine.load_weights(str(folder), 1)
    assert (await bench.engine.info()).weight_version == 0
    assert (await generation.end()).versions == [0] * 100
    after = await bench.generate(tokens=20)
    assert after.versions == [0] * 20
    if bench.can("policy"):
        assert after.logprobs == pytest.approx(logprobs(bench.checkpoints.first, PROMPT, after.ids), abs=NEAR)


async def test_a_paused_engine_takes_several_updates_and_goes_on_with_the_last(bench: Bench) -> None:
    generation = await bench.running(tokens=600)
    await bench.engine.pause("retract")
    for version, path in ((1, bench.checkpoints.second), (2, bench.checkpoints.first), (3, bench.checkpoints.second)):
        await bench.load(path, version)
    late = bench.start(tokens=20)
    await bench.engine.resume()
    assert set((await generation.end()).versions) == {0, 3}
    assert (await late.end()).versions == [3] * 20


async def test_the_untied_family_is_served_and_updated_too(
    bench: Bench, make_checkpoints: Callable[[str], Checkpoints], tmp_path: Path
) -> None:
    need(bench, "tied_and_untied")
    llama = make_checkpoints("llama")
    with bench.rig.start(llama.first, tmp_path) as process:
        other = Bench(bench.rig, process, llama, bench.rig.connect(process.url))
        first = await other.generate(tokens=40)
        await other.load(llama.second, 1)
        second = await other.generate(tokens=40)
        await other.engine.close()
    assert first.logprobs == pytest.approx(logprobs(llama.first, PROMPT, first.ids), abs=NEAR)
    assert second.logprobs == pytest.approx(logprobs(llama.second, PROMPT, second.ids), abs=NEAR)


async def test_two_updates_at_once_leave_one_of_both(bench: Bench) -> None:
    updates = [bench.load(bench.checkpoints.second, 1), bench.load(bench.checkpoints.first, 2)]
    await asyncio.gather(*updates, return_exceptions=True)
    info = await bench.engine.info()
    bench.version = info.weight_version or 0
    served = {1: bench.checkpoints.second, 2: bench.checkpoints.first}[bench.version]
    assert info.model_path == str(served)
    generation = await bench.generate(tokens=20, salt="both")
    assert generation.versions == [bench.version] * 20
    if bench.can("policy"):
        assert generation.logprobs == pytest.approx(logprobs(served, PROMPT, generation.ids), abs=NEAR)
