"""How many sessions may run: bounded by what the engines decode and by what can be trained before it is too old.

The tasks that new weights admit are counted on to be young: older weights that started them would have used up a part
of the staleness bound before it began, and the group would be dropped for it. So they wait, from the publication on,
until most engines serve these weights. Most, not all: one may be slow, or spared for an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

SHIFTS = 2
"""Sessions admitted per sequence that the engines decode together: while one is with its tools the other decodes."""


@dataclass(frozen=True)
class AdmissionFacts:
    """One stream's state. Counts are of samples unless they say otherwise."""

    produced: int
    """Samples ever started."""
    running: int
    admit_until: int
    """Tasks below this ordinal may start: the pipeline's staleness bound."""
    samples_per_task: int
    target_in_flight: int
    capacity: int | None = None
    """Sequences that the engines with an open route decode together; None: not known, which bounds nothing."""
    fresh_from: int | None = None
    """Tasks from this ordinal on were admitted with the newest weights; None: it does not matter what starts them."""
    engines: int = 0
    """Those with an open route."""
    behind: int = 0
    """Of them, those that serve older weights than the newest."""

    @property
    def may_start_until(self) -> int:
        """Tasks below this ordinal may start now.

        >>> [AdmissionFacts(0, 0, 8, 2, 64, fresh_from=4, engines=3, behind=n).may_start_until for n in (1, 2)]
        [8, 4]
        """
        waits = self.fresh_from is not None and 2 * self.behind > self.engines
        return min(self.admit_until, self.fresh_from or 0) if waits else self.admit_until


def in_flight_limit(target: int, capacity: int | None) -> int:
    """Sessions that may run at a time.

    >>> in_flight_limit(64, 8), in_flight_limit(64, None), in_flight_limit(4, 8)
    (16, 64, 4)
    """
    return target if capacity is None else min(target, SHIFTS * capacity)


def may_start(facts: AdmissionFacts, queued: int = 0) -> tuple[int, int]:
    """``(again, new)``: samples that may start now. Those ``queued`` for another attempt come first.

    New ones start in ordinal order, so their number alone says which; a group is begun when the one before has all its
    samples under way. Samples that were once admitted are tried again even behind a bound that has moved.
    """
    free = max(0, in_flight_limit(facts.target_in_flight, facts.capacity) - facts.running)
    again = min(free, queued)
    left = max(0, facts.may_start_until * facts.samples_per_task - facts.produced)
    return again, min(free - again, left)


def supply(facts: AdmissionFacts, complete: int) -> int:
    """Groups that rollout can still complete within the staleness bound; ``complete``: groups that are.

    >>> supply(AdmissionFacts(produced=8, running=2, admit_until=6, samples_per_task=2, target_in_flight=4), complete=3)
    3
    """
    return max(0, facts.admit_until - complete)
