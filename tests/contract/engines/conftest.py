"""The engines under test, each behind its HTTP server, and two checkpoints of one model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import Settings
from workers.engines.scripted import ScriptedEngine
from workers.engines.server import Server
from workers.engines.sglang import SglangEngine


@dataclass(frozen=True)
class Checkpoints:
    first: Path
    second: Path
    vocab_size: int = 64
    max_context: int = 512


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
        paths.append(tmp_path_factory.mktemp(f"checkpoint-{seed}"))
        Qwen3ForCausalLM(config).save_pretrained(paths[-1])
    return Checkpoints(*paths)


@asynccontextmanager
async def _embedded(checkpoints: Checkpoints) -> AsyncIterator[str]:
    engine = await EmbeddedEngine.start(Settings(checkpoints.first))
    server = Server(engine)
    yield await server.start()
    await server.stop()
    await engine.stop()


@asynccontextmanager
async def _scripted(checkpoints: Checkpoints) -> AsyncIterator[str]:
    engine = ScriptedEngine(
        vocab_size=checkpoints.vocab_size,
        max_context=checkpoints.max_context,
        model_path=str(checkpoints.first),
        delay_s=0.0005,
        strict_loads=True,
    )
    async with engine:
        yield engine.url


ENGINES = {"embedded": _embedded, "scripted": _scripted}


@pytest.fixture(params=sorted(ENGINES))
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of engine under test."""
    return str(request.param)


@pytest.fixture
async def engine(kind: str, checkpoints: Checkpoints) -> AsyncIterator[SglangEngine]:
    """Each engine in turn, through the adapter; the adapter checks no ids, so that the engine must."""
    async with ENGINES[kind](checkpoints) as url:
        adapter = SglangEngine(url, deadline_s=20.0, stall_s=20.0)
        yield adapter
        await adapter.close()
