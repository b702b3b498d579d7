"""When train nodes that roll out are called back, if gradients are accumulated as groups complete. Pure."""

from __future__ import annotations

PATIENCE = 0.1
"""Part of the time they compute that train nodes may wait for groups before they are called later."""
FIRST_SHARE = 0.5
"""Share before anything was measured."""
LATER, EARLIER, LEAST_SHARE = 0.1, 0.05, 0.1
"""Steps of :func:`next_share`, and the least share at which train nodes are called."""


def next_share(share: float, waited_s: float, train_s: float) -> float:
    """Share of the next batch that has to be complete when train nodes are called.

    Called early they wait for groups, called late the batch is complete and rollout waits for the update. So the share
    rises where they waited for more than :data:`PATIENCE` of the time they computed, and falls where not.

    >>> round(next_share(0.5, waited_s=3.0, train_s=10.0), 2), round(next_share(0.5, waited_s=0.2, train_s=10.0), 2)
    (0.6, 0.45)
    """
    return min(1.0, share + LATER) if waited_s > PATIENCE * train_s else max(LEAST_SHARE, share - EARLIER)


def recall_at(share: float, wanted: int) -> int:
    """Complete groups at which train nodes are called; ``wanted`` make a step.

    >>> recall_at(0.5, 8), recall_at(0.1, 2)
    (4, 1)
    """
    return max(1, min(wanted, round(share * wanted)))
