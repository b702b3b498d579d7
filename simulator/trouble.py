"""Nodes that fail and come back, and spot nodes that are taken away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import simpy

from simulator.fleet import Fleet, Process, Rack

if TYPE_CHECKING:
    from simulator.run import Scenario

HOUR = 3600.0


def trouble(
    env: simpy.Environment, given: Scenario, racks: Sequence[Rack], fleet: Fleet, count: Callable[[], None]
) -> None:
    """Start what takes nodes away, each with its own stream of random numbers; nothing if nothing fails."""
    failures = given.cluster.failures
    for number, rack in enumerate(racks):
        kind = rack.members[0].kind
        causes = []
        if failures.node_mtbf_h is not None:
            causes.append((failures.node_mtbf_h * HOUR / len(rack.members), failures.recover_s))
        if kind.mean_up_s is not None:
            causes.append((kind.mean_up_s, kind.mean_down_s))
        for cause, (up_s, down_s) in enumerate(causes):
            chance = np.random.default_rng((given.seed, 7, number, cause))
            env.process(_come_and_go(env, rack, fleet, chance, up_s, down_s, count))


def _come_and_go(
    env: simpy.Environment, rack: Rack, fleet: Fleet, chance: np.random.Generator, up_s: float, down_s: float,
    count: Callable[[], None],
) -> Process:  # fmt: skip
    while True:
        yield env.timeout(chance.exponential(up_s))
        if not rack.up:
            continue
        count()
        fleet.lose(rack)
        yield env.timeout(chance.exponential(down_s))
        fleet.find_again(rack)
