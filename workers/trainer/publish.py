"""Writes a model as the files an engine loads: safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")


def write_model(model: Any, weights: dict[str, Tensor], source: Path, folder: Path) -> None:
    """Write a transformers ``model`` with ``weights`` into ``folder``, with every other file of its ``source`` folder.

    Tied weights are written once. The same weights give the same bytes.
    """
    model.save_pretrained(folder, state_dict=weights)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(next(t.dtype for t in weights.values() if t.is_floating_point())).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    written = {path.name for path in folder.iterdir()}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def collect(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor]:
    """Tensors in main memory, floating point ones in ``dtype``; two names of one tensor stay two names of one tensor.

    All are drawn, so that other ranks can go on; without ``keep`` none is kept.
    """
    kept: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if keep and id(tensor) not in kept:
            kept[id(tensor)] = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        if keep:
            names[name] = kept[id(tensor)]
    return names
