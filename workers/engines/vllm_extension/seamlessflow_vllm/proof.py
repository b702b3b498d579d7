"""Whether a model holds the weights that went into it.

While a checkpoint is read, a few columns of each matrix and the whole of each vector are kept. Afterwards the model is
asked for the same: a matrix by the product of its layer with unit vectors, which is exact in every float type, so that
what is compared is what the layer computes with, however its weights are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

COLUMNS = 8
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Sample:
    """Of one tensor of a checkpoint."""

    values: torch.Tensor
    """A vector as it is; of a matrix [rows, :data:`COLUMNS` or fewer]."""
    width: int | None
    """Columns of the whole matrix; None for a vector."""


class Samples:
    """What was kept of a checkpoint, by its names of tensors."""

    def __init__(self) -> None:
        self._kept: dict[str, Sample] = {}
        self.seen = 0
        """Tensors that went by."""

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, sampled as they go by."""
        for name, tensor in tensors:
            self.seen += 1
            if tensor.dim() == 2:
                width = tensor.shape[1]
                self._kept[name] = Sample(tensor[:, columns(width)].clone(), width)
            elif tensor.dim() < 2:
                self._kept[name] = Sample(tensor.clone(), None)
            yield name, tensor

    def joined(self, names: Sequence[str]) -> Sample | None:
        """The named tensors one below the other; None if one is not known."""
        parts = [self._kept[name] for name in names if name in self._kept]
        if len(parts) != len(names) or len({part.width for part in parts}) != 1:
            return None
        return Sample(torch.cat([part.values for part in parts]), parts[0].width)

    def embedding(self) -> str | None:
        """Name of the input embedding."""
        return next((name for name in self._kept if name.endswith(EMBEDDING)), None)


@dataclass(frozen=True)
class Proof:
    """Result of a comparison."""

    wrong: list[str]
    """Tensors of the model that hold something else."""
    proven: int
    """Tensors of the checkpoint that were found in the model."""


def columns(width: int) -> list[int]:
    """The columns that are looked at, spread over the width, the same every time."""
    count = min(COLUMNS, width)
    return [i * width // count + (width // count) // 2 for i in range(count)]


def prove(model: torch.nn.Module, samples: Samples, *, tied: bool, dtype: torch.dtype) -> Proof:
    """Compare a model with what was kept of the checkpoint that it is said to hold.

    Args:
        tied: its head is its input embedding.
        dtype: type of the model's weights.
    """
    wrong: list[str] = []
    proven: set[str] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            name = f"{path}.{leaf}" if path else leaf
            parts = _parts(model, name, samples, tied)
            expected = samples.joined(parts)
            if parameter is None or expected is None:
                continue
            proven.update(parts)
            if not _equal(_held(module, leaf, parameter, expected), expected.values, dtype):
                wrong.append(name)
    return Proof(wrong, len(proven))


def _parts(model: torch.nn.Module, name: str, samples: Samples, tied: bool) -> list[str]:
    """The tensors of the checkpoint that one of the model is made of."""
    embedding = samples.embedding()
    if tied and embedding is not None and name.endswith("lm_head.weight"):
        return [embedding]
    owner, _, leaf = name.rpartition(".")
    prefix, _, layer = owner.rpartition(".")
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return [f"{prefix}.{part}.{leaf}" for part in packed[layer]] if layer in packed else [name]


def _held(module: Any, leaf: str, parameter: torch.Tensor, expected: Sample) -> torch.Tensor:
    if expected.width is None:
        return parameter
    if leaf == "weight" and hasattr(module, "cpu_linear"):
        unit = torch.zeros(len(columns(expected.width)), expected.width, dtype=parameter.dtype, device=parameter.device)
        for row, column in enumerate(columns(expected.width)):
            unit[row, column] = 1
        with torch.inference_mode():
            product: torch.Tensor = module.cpu_linear(unit, parameter, None)
        return product.t()
    return parameter[:, columns(expected.width)] if parameter.dim() == 2 else parameter


def _equal(held: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """A model may have rows of padding below those of the checkpoint, and hold single tensors in a wider type than its
    own, converted from that or from the checkpoint's."""
    rows = held[: expected.shape[0]] if expected.dim() else held
    if rows.shape != expected.shape:
        return False
    return any(torch.equal(rows, values.to(rows.device, rows.dtype)) for values in (expected, expected.to(dtype)))
