"""Digest and structure checks of a checkpoint directory, without torch."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from storage.errors import EngineRejected


def weight_files(directory: Path) -> list[Path]:
    """The ``*.safetensors`` files of ``directory`` by name; raises :class:`EngineRejected` if there are none."""
    if not directory.is_dir():
        raise EngineRejected(f"{directory} is not a directory: name the directory of a checkpoint")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineRejected(f"{directory} holds no *.safetensors file")
    return files


def weights_digest(directory: Path) -> str:
    """sha256 over the sorted ``name:sha256`` lines of all weight files: the digest rule of the weights store.

    If the directory has a manifest that lists file digests, they must match.
    """
    digests = {file.name: _sha256(file) for file in weight_files(directory)}
    for name, expected in _manifest(directory).items():
        if name in digests and digests[name] != expected:
            raise EngineRejected(
                f"{directory / name} is corrupt: sha256 {digests[name]}, the manifest says {expected}: publish it again"
            )
        if name.endswith(".safetensors") and name not in digests:
            raise EngineRejected(f"{directory / name} is missing: the manifest lists it")
    lines = "\n".join(f"{name}:{digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


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


def _manifest(directory: Path) -> dict[str, str]:
    """File digests from ``manifest.json``; a checkpoint that no store wrote has none."""
    file = directory / "manifest.json"
    if not file.exists():
        return {}
    files = read_json(file).get("files")
    if not isinstance(files, dict):
        raise EngineRejected(f"{file} has no table `files`")
    return {name: entry["sha256"] if isinstance(entry, dict) else str(entry) for name, entry in files.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
