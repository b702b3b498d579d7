"""When train nodes that roll out are called back, if gradients are accumulated as groups complete, and in what parts.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from workflows.scheduling.switching import GroupFlow

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


@dataclass(frozen=True)
class StepWaits:
    """What a step's train nodes did."""

    called: bool
    """From rollout, for this step, rather than kept from the one before."""
    waited_s: float
    """For groups, while the gang was theirs."""
    train_s: float
    """How long they computed."""
    rollout_s: float
    """From the beginning of the step until its batch was complete."""
    starved: bool
    """Whether rollout had started all that it may when the update was made."""


class Recall(BaseModel):
    """What is known of when to call them, carried from step to step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = FIRST_SHARE
    """Of a batch, complete when they are called."""
    idled_s: float = 0.0
    """What they waited when they last stayed: they would again, so much rolling out gains at least. It holds until they
    are called so late that they need not wait."""

    def after(self, step: StepWaits, flow: GroupFlow) -> Recall:
        """``flow``: as the next step begins. Nodes that stayed and waited may roll out for as long as that was.

        >>> stayed = StepWaits(called=False, waited_s=10.0, train_s=90.0, rollout_s=95.0, starved=False)
        >>> recall = Recall().after(stayed, GroupFlow(ready=10, wanted=100, supply=200, in_flight=50, rate=1.0))
        >>> recall.share, recall.idled_s
        (0.2, 10.0)
        """
        patient = step.waited_s <= PATIENCE * step.train_s
        if step.called:
            share = next_share(self.share, step.waited_s, step.train_s, step.rollout_s, starved=step.starved)
            return Recall(share=share, idled_s=0.0 if patient else self.idled_s)
        come = (flow.ready + flow.rate * step.waited_s) / flow.wanted
        share = self.share if patient else min(1.0, max(LEAST_SHARE, come))
        return Recall(share=share, idled_s=step.waited_s)

    def at(self, wanted: int) -> int:
        """Complete groups at which they are called; ``wanted`` make a step."""
        return recall_at(self.share, wanted)


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
