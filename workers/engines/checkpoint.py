"""Digest and structure checks of a checkpoint directory, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from storage.errors import ConfigError, EngineRejected, NotFoundError, StorageError
from storage.weights import MANIFEST, WeightsStore, folder_digest


def weight_files(directory: Path) -> list[Path]:
    """The ``*.safetensors`` files of ``directory`` by name; raises :class:`EngineRejected` if there are none."""
    if not directory.is_dir():
        raise EngineRejected(f"{directory} is not a directory: name the directory of a checkpoint")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineRejected(f"{directory} holds no *.safetensors file")
    return files


def verified_digest(directory: Path) -> str:
    """The digest of the weights store of ``directory``, after a check against its manifest if it was published.

    Raises:
        EngineRejected: a file is missing or corrupt.
    """
    try:
        if (directory / MANIFEST).exists():
            return WeightsStore(directory.parent).verify(directory)
        return folder_digest(directory)
    except (ConfigError, NotFoundError, StorageError) as error:
        raise EngineRejected(str(error)) from error
    except OSError as error:
        raise EngineRejected(f"{directory} cannot be read: {error}") from error


def check_headers(directory: Path) -> None:
    """Refuse files whose safetensors header does not fit their size (truncated or not safetensors at all)."""
    for file in weight_files(directory):
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise EngineRejected(f"{file} is no safetensors file: header of {length} bytes in {size}")
            try:
                header = json.loads(stream.read(length))
                end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise EngineRejected(f"{file} has a corrupt safetensors header: {error!r}") from None
        if 8 + length + end != size:
            raise EngineRejected(f"{file} has {size} bytes where its header says {8 + length + end}: truncated?")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from ``file``; raises :class:`EngineRejected` with the file's name."""
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise EngineRejected(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise EngineRejected(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineRejected(f"{file} must hold a JSON object")
    return value
