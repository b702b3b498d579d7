"""What is measured, in full and in brief."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.proxy.growth import shape
from benchmarks.proxy.measure import Scenario
from benchmarks.proxy.traffic import Shape, later_turns

STREAM, WHOLE, LONG = "stream, 4k prompt", "whole answer, 4k prompt", "stream, 100k prompt"
"""The three of the headline figures: later turns, 16 (100k: 4) sessions at a time, events as fast as they are taken."""
ALONE_STREAM, ALONE_WHOLE = "stream, 4k prompt, one at a time", "whole answer, 4k prompt, one at a time"
PACED, COLD, WARM = (
    "stream, 4k prompt, a token every 10 ms",
    "stream, 4k, first turn cold",
    "stream, 4k, first turn warm",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one call of the benchmark does."""

    scenarios: tuple[Scenario, ...]
    growing: Shape
    grown_sessions: int
    held_requests: int
    held_s: float


def full() -> Plan:
    """At most eight minutes on two quiet cores."""
    four, brief = later_turns(4_000, 4), later_turns(4_000, 4, answer="short", stream=False)
    first, sibling = Shape(4_000, 1), Shape(4_000, 1, group=4)
    scenarios = (
        Scenario(STREAM, four, range(1, 4), sessions=16, concurrency=16, rounds=7),
        Scenario(WHOLE, brief, range(1, 4), sessions=32, concurrency=16, rounds=7),
        Scenario(LONG, later_turns(100_000, 4), range(1, 4), sessions=4, concurrency=4, rounds=5),
        Scenario(ALONE_STREAM, four, range(1, 4), sessions=8, concurrency=1, rounds=4),
        Scenario(ALONE_WHOLE, brief, range(1, 4), sessions=8, concurrency=1, rounds=4),
        Scenario(PACED, four, range(1, 2), sessions=32, concurrency=32, rounds=3, step_ms=10),
        Scenario(COLD, first, range(1), sessions=16, concurrency=16, rounds=3, recorders_only=True),
        Scenario(WARM, sibling, range(1), 16, 16, 3, siblings_first=True, recorders_only=True),
    )
    return Plan(scenarios, shape(64, 100_000), grown_sessions=8, held_requests=300, held_s=30.0)


def quick() -> Plan:
    """Whether everything runs, in less than a minute; the figures mean little."""
    four, brief = later_turns(4_000, 3), later_turns(4_000, 3, answer="short", stream=False)
    first, sibling = Shape(4_000, 1), Shape(4_000, 1, group=4)
    scenarios = (
        Scenario(STREAM, four, range(1, 3), sessions=4, concurrency=4, rounds=1),
        Scenario(WHOLE, brief, range(1, 3), sessions=4, concurrency=4, rounds=1),
        Scenario(LONG, later_turns(100_000, 2), range(1, 2), sessions=1, concurrency=1, rounds=1),
        Scenario(ALONE_STREAM, four, range(1, 3), sessions=2, concurrency=1, rounds=1),
        Scenario(ALONE_WHOLE, brief, range(1, 3), sessions=2, concurrency=1, rounds=1),
        Scenario(PACED, four, range(1, 2), sessions=4, concurrency=4, rounds=1, step_ms=10),
        Scenario(COLD, first, range(1), sessions=4, concurrency=4, rounds=1, recorders_only=True),
        Scenario(WARM, sibling, range(1), 4, 4, 1, siblings_first=True, recorders_only=True),
    )
    return Plan(scenarios, shape(8, 100_000), grown_sessions=1, held_requests=30, held_s=2.0)
