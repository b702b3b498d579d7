"""When train nodes that roll out are called back, if gradients are accumulated as groups complete, and in what parts.

Pure.
"""

from __future__ import annotations

import math

PATIENCE = 0.02
"""Part of the time they compute that train nodes may wait for groups before they are called later."""
FIRST_SHARE = 0.5
"""Share before anything was measured."""
LEAST_SHARE = 0.1
PART = 0.25
"""Share of the missing groups that is worth a pass of its own: each costs a little, and rows are packed less well."""
EARLIER, MOST_LATER = 0.05, 0.3
"""Steps of :func:`next_share`: the one down, and the largest one up."""


def next_share(share: float, waited_s: float, train_s: float, rollout_s: float, *, starved: bool) -> float:
    """Share of the next batch that has to be complete when train nodes are called.

    Called early they wait for groups. Called late the batch is complete and waits for its update, which costs nothing
    while rollout has tasks to start, and every node once it has not: it is ``starved``. So the share falls as long as
    rollout is, until they wait. Where they waited for more than :data:`PATIENCE` of the time they computed, it rises by
    what rollout completed in the time beyond that, of the ``rollout_s`` that the whole batch took; by all of
    ``waited_s`` they would be late in the next step.

    >>> round(next_share(0.5, waited_s=3.0, train_s=10.0, rollout_s=20.0, starved=True), 2)
    0.64
    >>> [round(next_share(0.5, waited_s=0.2, train_s=10.0, rollout_s=20.0, starved=lack), 2) for lack in (True, False)]
    [0.45, 0.5]
    """
    if waited_s <= PATIENCE * train_s:
        return max(LEAST_SHARE, share - EARLIER) if starved else share
    later = (waited_s - PATIENCE * train_s) / rollout_s if rollout_s > waited_s else 1.0
    return min(1.0, share + min(MOST_LATER, later))


def recall_at(share: float, wanted: int) -> int:
    """Complete groups at which train nodes are called; ``wanted`` make a step.

    >>> recall_at(0.5, 8), recall_at(0.1, 2)
    (4, 1)
    """
    return max(1, min(wanted, round(share * wanted)))


def part_of(missing: int) -> int:
    """Complete groups that are accumulated together, at least, while a batch lacks ``missing``.

    Large parts first, single groups at the end: what is left when the last group is complete stands between the batch
    and its update.

    >>> part_of(16), part_of(9), part_of(2)
    (4, 3, 1)
    """
    return max(1, math.ceil(PART * missing))
