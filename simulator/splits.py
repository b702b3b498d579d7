"""Which tags for which nodes: how many nodes train, and which, found by simulating."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from simulator.cluster import Cluster, NodeKind
from simulator.fleet import POOL_NODES
from simulator.measure import Result
from simulator.run import Scenario, simulate
from workflows.scheduling import roofline
from workflows.scheduling.model_cost import ModelCost
from workflows.spec import Tag

COARSE = 6
"""Splits that are looked at before the search goes into detail around the best."""
ROLLOUT: frozenset[Tag] = frozenset({"rollout"})
BOTH: frozenset[Tag] = frozenset({"rollout", "train"})


def with_trainers(cluster: Cluster, count: int, model: ModelCost) -> Cluster:
    """The ``count`` nodes with the highest train priority get the tag ``train`` beside ``rollout``; nobody else."""
    ranked = sorted(cluster.nodes, key=lambda kind: -roofline.train_priority(kind.device, model))
    kinds: list[NodeKind] = []
    for kind in ranked:
        train = min(count, kind.count)
        count -= train
        for part, tags in ((train, BOTH), (kind.count - train, ROLLOUT)):
            if part:
                kinds.append(kind.model_copy(update={"count": part, "tags": tags}))
    return cluster.model_copy(update={"nodes": tuple(kinds)})


def fewest_trainers(cluster: Cluster, model: ModelCost) -> int:
    """Nodes whose memory holds weights, gradients and optimizer states together; at most all but one."""
    ranked = sorted(cluster.nodes, key=lambda kind: -roofline.train_priority(kind.device, model))
    needed = cluster.costs.train_bytes_per_parameter * model.parameters
    each = [kind for kind in ranked for _ in range(kind.count)]
    for count, kind in enumerate(each, 1):
        needed -= roofline.USABLE_MEMORY * kind.device.memory_bytes * kind.devices
        if needed <= 0:
            return count
    return max(1, len(each) - 1)


@dataclass(frozen=True)
class Search:
    """What was simulated: results by the number of train nodes."""

    results: dict[int, Result]

    @property
    def best(self) -> int:
        return min(self.results, key=lambda count: self.results[count].wall_s)

    def calmest(self, close: float) -> int:
        """Of the splits that take at most ``close`` longer than the fastest, the one whose nodes idle least."""
        limit = self.result.wall_s * (1 + close)
        near = [count for count, result in self.results.items() if result.wall_s <= limit]
        return min(near, key=lambda count: (self.results[count].idle_fraction, count))

    @property
    def result(self) -> Result:
        return self.results[self.best]


def search(scenario: Scenario, *, low: int | None = None, high: int | None = None, refine: bool = True) -> Search:
    """Simulate splits of the cluster's nodes, coarsely at first, then ever nearer to the best one.

    The time of a run falls with the number of train nodes while training bounds it and rises once rollout does, so
    halving the distance around the best finds the bottom of that valley to the node; :func:`exhaustive` is the check.
    Without ``refine`` the coarse splits are all.
    """
    low, high, rack = _bounds(scenario, low, high)
    step = max(rack, (high - low) // COARSE // rack * rack)
    seen: dict[int, Result] = {}
    for count in {*range(low, high + 1, step), high}:
        seen[count] = simulate(split(scenario, count))
    while refine and step > rack:
        step = max(rack, step // 2 // rack * rack)
        best = Search(seen).best
        for count in (best - step, best + step):
            if low <= count <= high and count not in seen:
                seen[count] = simulate(split(scenario, count))
    return Search(seen)


def climb(scenario: Scenario, start: int) -> Search:
    """Simulate splits from ``start`` on, as long as a neighbour is faster: with a good guess, a few of them."""
    low, high, rack = _bounds(scenario, None, None)
    at = min(high, max(low, round(start / rack) * rack))
    seen: dict[int, Result] = {}
    while True:
        for count in (at, at - rack, at + rack):
            if low <= count <= high and count not in seen:
                seen[count] = simulate(split(scenario, count))
        if Search(seen).best == at:
            return Search(seen)
        at = Search(seen).best


def balanced(scenario: Scenario) -> int:
    """Train nodes with which training takes as long as rollout, by the node-seconds of both in one simulation."""
    low, high, _ = _bounds(scenario, None, None)
    seconds = simulate(split(scenario, min(high, max(low, scenario.cluster.size // 2)))).seconds
    train, decode = seconds.get("train", 0.0), seconds.get("decode", 0.0)
    return min(high, max(low, round(scenario.cluster.size * train / max(1e-9, train + decode))))


def _bounds(scenario: Scenario, low: int | None, high: int | None) -> tuple[int, int, int]:
    """Fewest and most train nodes, and how many change their role together."""
    size = scenario.cluster.size
    rack = max(1, size // POOL_NODES)
    low = low or fewest_trainers(scenario.cluster, scenario.model)
    someone_must_roll_out = scenario.policy.trainers == "own" or scenario.policy.accumulates
    high = high or (size - rack if someone_must_roll_out else size)
    return min(math.ceil(low / rack) * rack, high), high, rack


def exhaustive(scenario: Scenario, low: int, high: int) -> Search:
    """Every split from ``low`` to ``high`` train nodes."""
    return Search({count: simulate(split(scenario, count)) for count in range(low, high + 1)})


def split(scenario: Scenario, count: int) -> Scenario:
    """The scenario with so many train nodes."""
    return replace(scenario, cluster=with_trainers(scenario.cluster, count, scenario.model))


def best_tags(scenario: Scenario, searched: Callable[[Scenario], Search] = search) -> tuple[int, Result]:
    """Train nodes and result of a pipeline at its best; colocated has no choice but all."""
    if scenario.policy.trainers == "preempt" and scenario.policy.holds_rollout:
        count = scenario.cluster.size
        return count, simulate(split(scenario, count))
    found = searched(scenario)
    return found.best, found.result
