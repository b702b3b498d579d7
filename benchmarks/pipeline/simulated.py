"""All pipelines, the peers' rules and the best static splits on the presets, simulated with equal staleness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simulator.advice import Choice, table
from simulator.cohorts import EXACT, shrunk
from simulator.lending import LENDING, PEERS, Hysteresis
from simulator.measure import Result
from simulator.presets import preset
from simulator.run import Scenario, simulate
from simulator.splits import search, split
from workflows.scheduling.pipeline import policy
from workflows.spec import PipelineSpec

PRESETS = (
    "math-8k-thinking", "math-8k-instruct", "math-20k-thinking", "math-20k-instruct", "swe-64k", "mixed-20k",
    "drift-20k",
)  # fmt: skip
SIZES = (4, 32, 64, 1024, 10_000)
STALENESS = 1
ENDLESS = 100_000
SEARCH_STEPS, STEPS, DRIFT_STEPS = 3, 6, 10
SEARCHED = 64
"""Nodes up to which splits are searched; above, shares of train nodes are those found at this size."""

STATIC = ("disaggregated", "micro_batch", "off_policy", "off_policy+parts")
"""Fixed roles. The last one is no pipeline of its own: off-policy filling that also accumulates gradients as groups
complete, which is the strongest that fixed roles can do."""
ON_POLICY = ("disaggregated", "micro_batch")
LENT = ("multiplexed", "multiplexed+parts")
"""The last one accumulates too, and calls its train nodes as early as they need not wait."""
EQUAL_STALENESS = ("off_policy", "off_policy+parts")


@dataclass(frozen=True)
class Cell:
    """One preset at one size."""

    name: str
    nodes: int
    choices: dict[str, Choice]
    seconds: float

    @property
    def key(self) -> str:
        return f"{self.name}@{self.nodes}"

    def wall(self, name: str) -> float:
        return self.choices[name].result.wall_s

    @property
    def best_static(self) -> str:
        """The fastest with fixed roles at the staleness that the multiplexed pipeline has."""
        return min((name for name in EQUAL_STALENESS if name in self.choices), key=self.wall)

    @property
    def gains(self) -> dict[str, float]:
        """In wall clock, at equal staleness, against the best static split; below 0 it loses.

        ``alike``: the multiplexed pipeline against off-policy filling, the same pipeline but for fixed roles.
        ``strongest``: the best of ours against the best of theirs, both with and without accumulation.
        """
        ours = min(self.wall(name) for name in LENT if name in self.choices)
        return {
            "alike": round(1 - self.wall("multiplexed") / self.wall("off_policy"), 4),
            "strongest": round(1 - ours / self.wall(self.best_static), 4),
        }

    @property
    def ratio(self) -> float:
        """Speed-up over synchronous colocated training."""
        return self.wall("colocated") / self.wall("multiplexed")

    def figures(self) -> dict[str, dict[str, float]]:
        best = self.wall(self.best_static)
        return {
            name: {
                **choice.result.figures(),
                "train_nodes": choice.trainers * choice.result.stands_for,
                "regret": round(choice.result.wall_s / best - 1, 4),
            }
            for name, choice in self.choices.items()
        }

    def text(self) -> str:
        best, gains = self.wall(self.best_static), self.gains
        regrets = [f"{n} {c.result.wall_s / best - 1:+.1%}" for n, c in self.choices.items() if n not in STATIC]
        return (
            f"{self.key}: {preset(self.name).about}\n{table(self.choices)}\n"
            f"best static split: {self.best_static} with {self.choices[self.best_static].trainers} train nodes, idle "
            f"{self.choices[self.best_static].result.idle_fraction:.1%}, which bounds what anybody can gain on it\n"
            f"multiplexed against off_policy at its best split: {gains['alike']:+.1%}; the best of ours against the "
            f"best static split: {gains['strongest']:+.1%}; against synchronous colocated: {self.ratio:.2f}x\n"
            f"regret against the best static split: {', '.join(regrets)}"
        )


def scenario(name: str, nodes: int, variant: str) -> Scenario:
    """One variant of a pipeline on a preset; staleness is the same for all that are off policy."""
    given = preset(name)
    base, _, parts = variant.partition("+")
    lending: Callable[..., Any] = LENDING["just-in-time"] if parts and base == "multiplexed" else Hysteresis
    if variant in PEERS:
        base, parts, lending = "multiplexed", "parts" if variant != "pearl" else "", LENDING[variant]
    bound = STALENESS if base in ("off_policy", "multiplexed") else None
    chosen = policy(PipelineSpec.model_validate({"name": base, "steps": ENDLESS, "max_staleness": bound}), 1)
    chosen = replace(chosen, groups_per_step=given.groups(nodes), accumulates=chosen.accumulates or bool(parts))
    return Scenario(chosen, given.cluster(nodes), given.model_cost, given.workload, given.group_size, lending=lending)


def measure(name: str, nodes: int, shares: dict[str, float]) -> Cell:
    """Run one cell. ``shares``: of train nodes by variant, where they are known from a smaller size."""
    began = time.perf_counter()
    steps = 2 if SEARCHED < nodes <= EXACT else DRIFT_STEPS if name.startswith("drift") else STEPS
    choices = {"colocated": Choice(nodes, _final(scenario(name, nodes, "colocated"), nodes, steps))}
    variants: tuple[str, ...] = (*STATIC, *LENT)
    if SEARCHED < nodes <= EXACT:  # each takes a minute
        variants = ("off_policy", "off_policy+parts", "multiplexed")
    for variant in variants:
        asked = scenario(name, nodes, variant)
        if nodes <= SEARCHED:
            refine = variant not in ON_POLICY  # they lose by far; their best split need not be known to the node
            count = search(replace(asked, stop_after=SEARCH_STEPS), refine=refine).best
        else:
            count = max(1, round(shares.get(variant, 0.5) * nodes))
        choices[variant] = _choice(asked, count, steps)
    if nodes <= SEARCHED:
        for peer in PEERS:
            tried = {choices[other].trainers for other in ("off_policy", "multiplexed+parts")}
            options = [_choice(scenario(name, nodes, peer), count, steps) for count in sorted(tried)]
            choices[peer] = min(options, key=lambda choice: choice.result.wall_s)
    return Cell(name, nodes, choices, time.perf_counter() - began)


def _choice(asked: Scenario, count: int, steps: int) -> Choice:
    result = _final(asked, count, steps)
    return Choice(max(1, round(count / result.stands_for)), result)


def _final(asked: Scenario, count: int, steps: int) -> Result:
    tagged = replace(split(asked, count), stop_after=steps)
    return simulate(tagged if asked.cluster.size <= EXACT else shrunk(tagged))


def cohort_error(cell: Cell) -> float:
    """Largest error of the wall clock by cohorts, over the variants of a cell that was simulated exactly."""
    worst = 0.0
    for variant, choice in cell.choices.items():
        tagged = split(scenario(cell.name, cell.nodes, variant), choice.trainers)
        again = simulate(shrunk(replace(tagged, stop_after=len(choice.result.steps))))
        worst = max(worst, abs(again.wall_s / choice.result.wall_s - 1))
    return worst


def speed(nodes: int = 10_000, steps: int = 100) -> float:
    """Seconds that the simulation of so many nodes takes."""
    began = time.perf_counter()
    tagged = split(scenario("math-20k-thinking", nodes, "multiplexed"), nodes // 3)
    simulate(shrunk(replace(tagged, stop_after=steps)))
    return time.perf_counter() - began


def shares_of(cells: list[Cell], name: str) -> dict[str, float]:
    """Shares of train nodes that were best at the largest searched size."""
    known = [cell for cell in cells if cell.name == name and cell.nodes <= SEARCHED]
    if not known:
        return {}
    largest = max(known, key=lambda cell: cell.nodes)
    return {variant: choice.trainers / largest.nodes for variant, choice in largest.choices.items()}
