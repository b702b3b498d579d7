"""Writes a model as the files an engine loads: safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")


def write_model(model: Any, source: Path, folder: Path) -> None:
    """Write a transformers ``model`` into ``folder``, with every other file of its ``source`` directory.

    Tied weights are written once, values in the model's own dtype. The same weights give the same bytes.
    """
    model.save_pretrained(folder)
    written = {path.name for path in folder.iterdir()}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in written and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
