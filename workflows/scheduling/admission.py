"""How many sessions may run: bounded by what the engines decode and by what can be trained before it is too old."""

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
    left = max(0, facts.admit_until * facts.samples_per_task - facts.produced)
    return again, min(free - again, left)


def supply(facts: AdmissionFacts, complete: int) -> int:
    """Groups that rollout can still complete within the staleness bound; ``complete``: groups that are.

    >>> supply(AdmissionFacts(produced=8, running=2, admit_until=6, samples_per_task=2, target_in_flight=4), complete=3)
    3
    """
    return max(0, facts.admit_until - complete)
