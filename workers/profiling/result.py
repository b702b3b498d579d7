"""What a measurement of a node gives. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

from workflows.messages import NodeRate
from workflows.scheduling.devices import DeviceProfile


@dataclass(frozen=True)
class Row:
    """A load that was not fitted: ``batch`` sequences of ``context`` tokens, and how far the prediction is off."""

    role: Literal["decode", "train"]
    batch: int
    context: float
    measured: float
    """Tokens/s."""
    error: float
    """Predicted / measured - 1."""


class ProfileResult(BaseModel):
    """Written by ``python -m workers.profiling`` as one line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: DeviceProfile
    rows: tuple[Row, ...]
    train_priority: float
    decode_tokens_s: float
    """Predicted under a usual load."""
    train_tokens_s: float

    def error(self, role: Literal["decode", "train"]) -> float:
        """Mean absolute error of a role's predictions."""
        errors = [abs(row.error) for row in self.rows if row.role == role]
        return sum(errors) / len(errors)

    def rates(self) -> tuple[NodeRate, ...]:
        """What the pool is told: predictions, and their errors on the loads that were not fitted."""
        return (
            NodeRate(role="decode", predicted=self.decode_tokens_s, error=self.error("decode")),
            NodeRate(role="train", predicted=self.train_tokens_s, error=self.error("train")),
        )
