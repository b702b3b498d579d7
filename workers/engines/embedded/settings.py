"""Options of the embedded engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run one model."""

    model_path: Path
    weight_version: str = "0"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights are rounded to it; see :func:`workers.engines.embedded.engine.compute_type`."""
    max_running: int = 32
    kv_tokens: int = 65536
    max_context: int | None = None
    """None: the model's."""
    threads: int = 1
    log_tokens: Path | None = None
    seed: int = 0
