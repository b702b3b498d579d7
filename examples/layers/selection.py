"""A batch selection of your own: ``pipeline: {selection: examples.layers.selection:widest_rewards}``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev

from workflows.scheduling.selection import Candidate


def widest_rewards(waiting: Sequence[Candidate], wanted: int) -> Sequence[int]:
    """The groups whose rewards differ most: they teach most; of equals, the oldest."""
    best = sorted(waiting, key=lambda group: (-pstdev(group.rewards), group.ordinal))
    return [group.ordinal for group in best[:wanted]]
