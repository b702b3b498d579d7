"""Writes a model as the files an engine loads: safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")


def write_model(model: Any, source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a transformers ``model`` into ``folder`` in ``dtype``, with every other file of its ``source`` directory.

    Tied weights are written once. The same weights give the same bytes.
    """
    model.save_pretrained(folder, state_dict=_cast(model.state_dict(), dtype))
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    written = {path.name for path in folder.iterdir()}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def _cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating point tensors in ``dtype``; two names of one tensor stay two names of one tensor."""
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }
