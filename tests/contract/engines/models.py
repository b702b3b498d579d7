"""Tiny random models of two families, with a tokenizer of 64 letters, and their plain forward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 64
CONTEXT = 8192
LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz012345678{}"'
"""Token ``i`` is the text ``LETTERS[i]``."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM has no smaller one on the CPU
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
}


def write_model(folder: Path, family: str, seed: int) -> Path:
    """A checkpoint directory; equal arguments give equal weights."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model: Any = model_class(config_class(**SHAPE, **extra))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts norms at 1, which would hide a mistake in them.
            spread = 0.1 if "norm" in name else 0.25
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="A"))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text(ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


@functools.cache
def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def distributions(
    folder: Path,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    temperature: float = 1.0,
    bias: Mapping[int, float] | None = None,
) -> torch.Tensor:
    """[output, vocabulary] log-probs of one plain forward pass in front of each output token."""
    with torch.no_grad():
        logits = _model(folder)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    for token, change in (bias or {}).items():
        logits[:, token] += change
    return torch.log_softmax(logits / temperature, -1)


def logprobs(folder: Path, prompt: Sequence[int], output: Sequence[int], **options: Any) -> list[float]:
    """Of the output tokens by one plain forward pass."""
    rows = distributions(folder, prompt, output, **options)
    return [row[token].item() for row, token in zip(rows, output, strict=True)]
