"""What only a real vLLM server can show: its workers, its cache, its ways to die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.contract.engines.driver import PROMPT, Bench
from tests.contract.engines.models import logprobs
from tests.contract.engines.test_generation import NEAR
from workers.engines.base import PauseMode
from workers.engines.vllm import VllmEngine
from workers.trainer.objective import token_logprobs

pytestmark = pytest.mark.parametrize("rig", ["vllm"], indirect=True, scope="session")

CACHED = [n % 60 for n in range(300)]
"""A prompt with whole blocks of the KV cache: those of the CPU have 128 tokens."""


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2, "temperature": 1.3}]
)
async def test_log_probs_are_those_that_the_trainer_computes(bench: Bench, options: dict[str, Any]) -> None:
    generation = await bench.generate(tokens=200, **options)
    model: Any = AutoModelForCausalLM.from_pretrained(bench.checkpoints.first, dtype=torch.float32)
    with torch.no_grad():
        logits_NV = model(torch.tensor([[*PROMPT, *generation.ids]])).logits[0, len(PROMPT) - 1 : -1]
    target_N = torch.tensor(generation.ids)
    computed_N, _ = token_logprobs(logits_NV, target_N, options.get("temperature", 1.0))
    assert torch.tensor(generation.logprobs) == pytest.approx(computed_N, abs=1e-3)


def _broken(folder: Path, source: Path) -> Path:
    """A checkpoint whose second file is garbage: half of its tensors have gone in when that is found out."""
    tensors = sorted(load_file(source / "model.safetensors").items())
    folder.mkdir()
    save_file(dict(tensors[: len(tensors) // 2]), folder / "model-1.safetensors")
    (folder / "model-2.safetensors").write_bytes(b"\xff" * 64)
    return folder


async def test_a_load_that_breaks_off_in_the_worker_is_undone_there(bench: Bench, tmp_path: Path) -> None:
    assert isinstance(bench.engine, VllmEngine)
    broken = _broken(tmp_path / "broken", bench.checkpoints.second)
    generation = await bench.running()
    await bench.engine.pause("retract")
    (answer,) = await bench.engine._workers("seamlessflow_load", [str(broken)])
    assert (answer["loaded"], answer["lost"]) == (False, None)
    await bench.engine.resume()
    await generation.reach(len(generation.ids) + 50)
    await bench.engine.abort(generation.rid)
    await generation.end()
    expected = logprobs(bench.checkpoints.first, generation.prompt, generation.ids)
    assert generation.logprobs == pytest.approx(expected, abs=NEAR)
    loaded = await bench.load(bench.checkpoints.second, 1)
    assert loaded.checksum is not None


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_request_that_waited_through_an_update_reads_nothing_of_the_old_weights(
    bench: Bench, mode: PauseMode
) -> None:
    await bench.generate(prompt=CACHED, salt="same")
    await bench.engine.pause(mode)
    waiting = bench.start(tokens=20, prompt=CACHED, salt="same")
    await bench.until_live(1)
    await bench.load(bench.checkpoints.second, 1)
    await bench.engine.resume()
    await waiting.end()
    assert waiting.versions == [1] * 20
    expected = logprobs(bench.checkpoints.second, CACHED, waiting.ids)
    assert waiting.logprobs == pytest.approx(expected, abs=NEAR)


async def test_prompts_of_full_length_with_seeds_are_read_together_and_again_after_a_retraction(bench: Bench) -> None:
    prompts = [[n, *(i % 61 for i in range(1800))] for n in range(6)]
    generations = [bench.start(tokens=200, prompt=prompt, seed=7) for prompt in prompts]
    await asyncio.gather(*(generation.reach(5) for generation in generations))
    await bench.engine.pause("retract")
    await bench.engine.resume()
    for generation in generations:
        await generation.end()
        assert (generation.finish, len(generation.ids)) == ("length", 200)
    expected = logprobs(bench.checkpoints.first, prompts[0], generations[0].ids)
    assert generations[0].logprobs == pytest.approx(expected, abs=NEAR)
