"""Where a rank stands: written by the working thread, read by the control port."""

from __future__ import annotations

from dataclasses import dataclass

from workers.trainer.messages import Phase


@dataclass
class Progress:
    """Plain values, replaced one at a time: a reader in another thread sees each whole."""

    phase: Phase = "starting"
    version: int = 0
    """Weight version held."""
    lineage: int = 0
    """Of the checkpoint held."""
    step: int = 0
    """The step in work, or the next one."""
