"""Two weight versions of a small random model that talks: it ends its turn about once in two hundred tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.models import tiny

CONTEXT = 1024
SPREAD = 0.19
"""Of the embeddings: with 64 of them the logits have a deviation of 1.5, so a log-prob says which text came before."""


def write_models(folder: Path) -> tuple[Path, Path]:
    """Checkpoint directories of versions 0 and 1."""
    return _write(folder / "even", 0), _write(folder / "odd", 1)


def _write(folder: Path, seed: int) -> Path:
    model: Any = tiny.new_model(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(SPREAD * torch.randn_like(parameter))
        model.get_input_embeddings().weight[END] = 0.0  # the head is tied to it: its logit is 0 whatever came before
    model.config.max_position_embeddings = CONTEXT
    folder.mkdir(parents=True)
    tiny.save(model, folder)
    return folder


END = tiny.MARKERS.index(tiny.END)
_TOKENIZER: Tokenizer = tiny.tokenizer()


def text(ids: Sequence[int]) -> str:
    """What an agent reads of these tokens: special ones have no text."""
    return str(_TOKENIZER.decode(list(ids), skip_special_tokens=True))


def token_text(token: int) -> str:
    """As ``logprobs`` of an answer name a token."""
    return str(_TOKENIZER.decode([token], skip_special_tokens=False))
