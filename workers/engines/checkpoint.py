"""Digest and structure checks of a checkpoint directory, without torch."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
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


SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes of one element, by the name of its type in a safetensors header."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint.

    *Example*: ``Stored("model.norm.weight", "BF16", (2048,), Path("model.safetensors"), 8192, 12288)``
    """

    name: str
    dtype: str
    """A key of :data:`SIZES`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Of its bytes in the file."""
    end: int


def check_headers(directory: Path) -> None:
    """Refuse files that a safetensors reader would not take (truncated, with gaps, or not safetensors at all)."""
    stored_tensors(directory)


def stored_tensors(directory: Path) -> list[Stored]:
    """Every tensor of the checkpoint, by file name and position in it.

    Raises:
        EngineRejected: a header is broken or does not fit its file, or a name is there twice.
    """
    tensors = [tensor for file in weight_files(directory) for tensor in _read_header(file)]
    seen: dict[str, Path] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise EngineRejected(
                f"{directory}: tensor {tensor.name} is in {seen[tensor.name].name} and {tensor.file.name}"
            )
        seen[tensor.name] = tensor.file
    return tensors


def _read_header(file: Path) -> list[Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise EngineRejected(f"{file} is no safetensors file: header of {length} bytes in {size}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = [_stored(file, name, entry, 8 + length) for name, entry in header.items()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineRejected(f"{file} has a corrupt safetensors header: {error!r}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            raise EngineRejected(f"{file}: tensor {tensor.name} begins at byte {tensor.start}, not at {end}")
        end = tensor.end
    if end != size:
        raise EngineRejected(f"{file} has {size} bytes where its header says {end}: truncated?")
    return tensors


def _stored(file: Path, name: str, entry: dict[str, Any], base: int) -> Stored:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"{name} has shape {entry['shape']} at {entry['data_offsets']}")
    if end - start != math.prod(shape) * SIZES[entry["dtype"]]:
        raise ValueError(f"{name} of type {entry['dtype']} and shape {shape} has {end - start} bytes")
    return Stored(name, entry["dtype"], shape, file, base + start, base + end)


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
