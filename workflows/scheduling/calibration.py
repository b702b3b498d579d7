"""A device profile from measurements: the efficiencies and overheads with which the roofline predicts them best.

Pure; :mod:`workers.profiling` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from workflows.scheduling.devices import DeviceProfile
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import decode_step_s, train_s

GRID = tuple(0.002 * 1.09**n for n in range(73))
"""Efficiencies tried: 0.2 % to 1, each 9 % above the one before."""


@dataclass(frozen=True)
class DecodePoint:
    """``seconds`` of one decode step of ``batch`` sequences whose KV holds ``context_tokens`` in all."""

    batch: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True)
class TrainPoint:
    """``seconds`` of an update on ``tokens`` tokens in sequences of ``context`` tokens."""

    tokens: float
    context: float
    seconds: float


def fit_decode(device: DeviceProfile, model: ModelCost, points: Sequence[DecodePoint]) -> DeviceProfile:
    """Fit ``decode_efficiency``, ``prefill_efficiency``, ``decode_step_s`` and ``decode_sequence_s``: least squares of
    the relative error. Raises :class:`ValueError` without points.
    """
    bare = device.model_copy(update={"decode_step_s": 0.0, "decode_sequence_s": 0.0})

    def tried(read: float, compute: float) -> tuple[float, DeviceProfile]:
        shape = bare.model_copy(update={"decode_efficiency": read, "prefill_efficiency": compute})
        roof = [decode_step_s(shape, model, p.batch, p.context_tokens) for p in points]
        step, sequence = _overheads(
            [(1 / p.seconds, p.batch / p.seconds, 1 - r / p.seconds) for p, r in zip(points, roof, strict=True)]
        )
        fitted = shape.model_copy(update={"decode_step_s": step, "decode_sequence_s": sequence})
        return sum(decode_error(fitted, model, p) ** 2 for p in points), fitted

    return _best(tried(read, compute) for read, compute in product(GRID, GRID))


def fit_train(device: DeviceProfile, model: ModelCost, points: Sequence[TrainPoint]) -> DeviceProfile:
    """Fit ``train_efficiency``, ``train_step_s`` and ``train_sequence_s``, in the same way."""
    bare = device.model_copy(update={"train_step_s": 0.0, "train_sequence_s": 0.0})

    def tried(efficiency: float) -> tuple[float, DeviceProfile]:
        shape = bare.model_copy(update={"train_efficiency": efficiency})
        roof = [train_s(shape, model, p.tokens, context=p.context) for p in points]
        step, sequence = _overheads(
            [
                (1 / p.seconds, p.tokens / p.context / p.seconds, 1 - r / p.seconds)
                for p, r in zip(points, roof, strict=True)
            ]
        )
        fitted = shape.model_copy(update={"train_step_s": step, "train_sequence_s": sequence})
        return sum(train_error(fitted, model, p) ** 2 for p in points), fitted

    return _best(tried(efficiency) for efficiency in GRID)


def decode_error(device: DeviceProfile, model: ModelCost, point: DecodePoint) -> float:
    """Predicted against measured tokens/s, minus 1."""
    return point.seconds / decode_step_s(device, model, point.batch, point.context_tokens) - 1


def train_error(device: DeviceProfile, model: ModelCost, point: TrainPoint) -> float:
    """Predicted against measured tokens/s, minus 1."""
    return point.seconds / train_s(device, model, point.tokens, context=point.context) - 1


def _best(tries: Iterable[tuple[float, DeviceProfile]]) -> DeviceProfile:
    return min(tries, key=lambda tried: tried[0])[1]


def _overheads(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """``x, y >= 0`` that minimise the sum of ``(a*x + b*y - c)**2`` over rows ``(a, b, c)``."""
    aa = sum(a * a for a, _, _ in rows)
    bb = sum(b * b for _, b, _ in rows)
    ab = sum(a * b for a, b, _ in rows)
    ac = sum(a * c for a, _, c in rows)
    bc = sum(b * c for _, b, c in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    only_x, only_y = max(0.0, ac / aa), max(0.0, bc / bb) if bb else 0.0
    gain_x, gain_y = ac * only_x, bc * only_y
    return (only_x, 0.0) if gain_x >= gain_y else (0.0, only_y)
