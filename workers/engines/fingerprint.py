"""What the tensors of a checkpoint look like from inside an engine: by the checksums it must report for them.

SGLang on the CPU names a tensor by the first eight bytes of its sha256, and holds the projections of one input as one
tensor. So what it serves can be proved from the files alone. Needs numpy, not torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from storage.errors import EngineRejected
from workers.engines.checkpoint import Stored

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types that weights may be stored in, as torch names them."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Tensor of the engine -> tensors of the checkpoint that it is made of, in order."""

Words = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def check_finite(tensors: Sequence[Stored]) -> None:
    """Refuse a checkpoint that holds NaN or infinity: an engine would serve it without a word."""
    exponent = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}
    for tensor in tensors:
        mask = exponent[tensor.dtype]
        if np.any((_words(tensor) & mask) == mask):
            raise EngineRejected(f"{tensor.file}: tensor {tensor.name} holds NaN or infinity")


def expected_checksums(names: Sequence[str], tensors: Sequence[Stored], dtype: str) -> dict[str, str]:
    """The checksum of each tensor of ``names`` (the engine's) that can be told from the files.

    Args:
        dtype: type that the engine holds its weights in.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    expected: dict[str, str] = {}
    for name in names:
        parts = [stored[part] for part in _parts(name) if part in stored]
        if parts and len(parts) == len(list(_parts(name))):
            digest = hashlib.sha256()
            for part in parts:
                digest.update(np.ascontiguousarray(_cast(_words(part), part.dtype, dtype)).data)
            expected[name] = digest.digest()[:8].hex()
    return expected


def differing(reported: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Names whose checksums are not the same, of those that both know."""
    return sorted(name for name, value in expected.items() if name in reported and reported[name] != value)


def _parts(name: str) -> Iterator[str]:
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            yield from (name.replace(fused, part) for part in parts)
            return
    yield name


def _words(tensor: Stored) -> Words:
    """The tensor's bits, mapped from its file."""
    word = np.dtype("<u4") if tensor.dtype == "F32" else np.dtype("<u2")
    count = (tensor.end - tensor.start) // word.itemsize
    if not count:
        return np.zeros(0, word)
    return np.memmap(tensor.file, dtype=word, mode="r", offset=tensor.start, shape=(count,))


def _cast(words: Words, source: str, target: str) -> Words:
    """The bits after a conversion as torch makes it."""
    if FLOATS[source] == target:
        return words
    if source == "F16":
        wide = words.view("<f2").astype("<f4").view("<u4")
    else:
        wide = words if source == "F32" else words.astype("<u4") << np.uint32(16)
    if target == "float32":
        return wide
    if target == "bfloat16":  # to the nearest, ties to even
        return ((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    with np.errstate(over="ignore"):  # infinity, as torch has it
        return wide.view("<f4").astype("<f2").view("<u2")
