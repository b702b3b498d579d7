"""Tiny random models of each architecture, made with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied-bias-rope3": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
}

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_model(name, seed)``: the directory of a random model; the same call gives the same directory."""
    made: dict[tuple[str, int], Path] = {}

    def make(name: str = "qwen3", seed: int = 0) -> Path:
        if (name, seed) not in made:
            config_class, model_class, extra = MODELS[name]
            torch.manual_seed(seed)
            model = model_class(config_class(**{**SHAPE, **extra}))
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    # transformers starts norms at 1 and biases at 0, which would hide a mistake in them.
                    spread = 0.3 if parameter.dim() > 1 else 0.2
                    parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in key))
            made[name, seed] = tmp_path_factory.mktemp(f"{name}-{seed}")
            model.save_pretrained(made[name, seed])
        return made[name, seed]

    return make


@pytest.fixture(scope="session")
def distributions() -> Callable[..., list[list[float]]]:
    """``distributions(directory, prompt, output, temperature, bias)``: of one plain forward pass, for each output token
    the log-probs of the whole vocabulary in front of it."""

    def logprobs(
        directory: Path, prompt: list[int], output: list[int], temperature: float = 1.0, bias: Any = None
    ) -> list[list[float]]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        for token, change in (bias or {}).items():
            logits[:, token] += change
        return torch.log_softmax(logits / temperature, -1).tolist()

    return logprobs


@pytest.fixture(scope="session")
def reference(distributions: Callable[..., list[list[float]]]) -> Callable[..., list[float]]:
    """``reference(directory, prompt, output, temperature)``: log-probs of output by one plain forward pass."""

    def logprobs(directory: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        rows = distributions(directory, prompt, output, temperature)
        return [row[token] for row, token in zip(rows, output, strict=True)]

    return logprobs
