"""More nodes than are simulated one by one: each simulated node stands for many like it.

Every node of a cohort has the same load, so what is simulated is the same cluster at a smaller size: nodes, groups of
a step and gang shrink by one factor. Its groups are chosen from all that the real step has, in equal parts from the
quickest to the slowest, the slowest one included (:mod:`simulator.workload`): that is what a step waits for, and a
small sample would not have it. The error is what :func:`error` measures at a size that is still simulated exactly.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.measure import Result
from simulator.run import Scenario, simulate

EXACT = 1024
"""Nodes up to which each is simulated."""
COHORTS = 32
"""Simulated nodes of a larger cluster."""


def shrunk(scenario: Scenario, cohorts: int = COHORTS) -> Scenario:
    """The scenario with about ``cohorts`` simulated nodes, each of which stands for as many real ones."""
    size = scenario.cluster.size
    factor = max(1, round(size / cohorts))
    kinds = tuple(
        kind.model_copy(update={"count": max(1, round(kind.count / factor))}) for kind in scenario.cluster.nodes
    )
    simulated = sum(kind.count for kind in kinds)
    groups = max(1, round(scenario.policy.groups_per_step * simulated / size))
    target = max(1, scenario.target_in_flight * simulated // size)
    return replace(
        scenario,
        cluster=scenario.cluster.model_copy(update={"nodes": kinds}),
        policy=replace(scenario.policy, groups_per_step=groups),
        target_in_flight=target,
        stands_for=factor,
    )


def simulate_any(scenario: Scenario) -> Result:
    """Exactly up to :data:`EXACT` nodes, by cohorts above."""
    return simulate(scenario if scenario.cluster.size <= EXACT else shrunk(scenario))


def error(scenario: Scenario, cohorts: int = COHORTS) -> float:
    """Relative error of the wall clock by cohorts against the exact simulation of the same scenario."""
    exact = simulate(scenario).wall_s
    return simulate(shrunk(scenario, cohorts)).wall_s / exact - 1
