"""All pipelines, the peers' rules and the best static splits on the presets, simulated with equal staleness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simulator.advice import Choice, table
from simulator.cohorts import EXACT, shrunk
from simulator.lending import LENDING, PEERS, Hysteresis, JustInTime
from simulator.measure import Result
from simulator.presets import preset
from simulator.run import Scenario, simulate
from simulator.splits import Search, balanced, climb, search, split
from workflows.scheduling.pipeline import policy
from workflows.spec import PipelineSpec

PRESETS = (
    "math-8k-thinking", "math-8k-instruct", "math-20k-thinking", "math-20k-instruct", "swe-64k", "mixed-20k",
    "drift-20k",
)  # fmt: skip
SIZES = (4, 32, 64, 1024, 10_000)
STALENESS = 1
ENDLESS = 100_000
WARM_UP, STEPS = 4, 4
"""Updates before the measured time, in which a run fills and what it had in stock is used up, and those measured."""
SEARCH_WARM_UP, SEARCH_STEPS = 3, 2
FEW, FEW_TIMES = 1024, 4
"""Where a step has no more samples than this, luck matters: so many times as many updates are measured."""
LARGE_WARM_UP, LARGE_STEPS = 2, 1
"""The same from more than :data:`SEARCHED` nodes up to those that are simulated one by one: each takes a minute. Behind
the first update train nodes that are to stay may still change over, which the second shows."""
DRIFT_STEPS, DRIFT_PACE = 10, 20
"""Drifting lengths need a long run: of so many steps one is simulated, with the drift of all of them."""
EXPLORED, SEARCHED = 32, 64
"""Nodes up to which splits are searched from nothing, and around the shares of the smaller size; above, the shares are
those found there."""
CLOSE = 0.02
"""Of our splits that are so near to the fastest, the one with the least idle time is shown."""

STATIC = ("disaggregated", "micro_batch", "off_policy", "off_policy+parts")
"""Fixed roles. The last one is off-policy filling that accumulates gradients as groups complete, too: the strongest
that fixed roles can do."""
OURS = "multiplexed"
"""It accumulates, and calls its train nodes as early as they need not wait."""
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

        ``filling``: against off-policy filling, which trains whole batches. ``strongest``: against the faster of that
        and off-policy filling that accumulates as ours does.
        """
        ours = self.wall(OURS)
        return {
            "filling": round(1 - ours / self.wall("off_policy"), 4),
            "strongest": round(1 - ours / self.wall(self.best_static), 4),
        }

    @property
    def ratio(self) -> float:
        """Speed-up over synchronous colocated training."""
        return self.wall("colocated") / self.wall(OURS)

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
            f"multiplexed against off_policy at its best split: {gains['filling']:+.1%}; against the best static "
            f"split: {gains['strongest']:+.1%}; against synchronous colocated: {self.ratio:.2f}x\n"
            f"regret against the best static split: {', '.join(regrets)}"
        )


def scenario(name: str, nodes: int, variant: str) -> Scenario:
    """One variant of a pipeline on a preset; staleness is the same for all that are off policy."""
    given, base = preset(name), variant.partition("+")[0]
    accumulate = variant in ("off_policy+parts", OURS, *PEERS) and variant != "pearl"
    lending: Callable[..., Any] = JustInTime if variant == OURS else LENDING.get(variant, Hysteresis)
    base = OURS if variant in PEERS else base
    bound = STALENESS if base in ("off_policy", OURS) else None
    spec = {"name": base, "steps": ENDLESS, "max_staleness": bound, "accumulate": accumulate}
    chosen = policy(PipelineSpec.model_validate(spec), given.groups(nodes))
    work = given.workload
    if work.drift_per_100_steps != 1:
        work = work.model_copy(update={"drift_per_100_steps": work.drift_per_100_steps**DRIFT_PACE})
    return Scenario(chosen, given.cluster(nodes), given.model_cost, work, given.group_size, lending=lending)


def measure(name: str, nodes: int, shares: dict[str, float]) -> Cell:
    """Run one cell. ``shares``: of train nodes by variant, where they are known from a smaller size."""
    began = time.perf_counter()
    choices = {"colocated": Choice(nodes, _final(scenario(name, nodes, "colocated"), nodes))}
    for variant in variants(nodes):
        if variant in EQUAL_STALENESS or variant == OURS:
            starts = {choices[n].trainers for n in EQUAL_STALENESS} if variant == OURS else set()
            choices[variant] = _best(name, nodes, variant, shares, starts)
        else:  # they lose by far; their best split need not be known to the node
            count = _share(nodes, variant, shares) or balanced(_briefly(scenario(name, nodes, variant)))
            choices[variant] = _choice(scenario(name, nodes, variant), count)
    for peer in PEERS if nodes <= EXPLORED else ():
        tried = {choices[other].trainers for other in ("off_policy", OURS)}
        options = [_choice(scenario(name, nodes, peer), count) for count in sorted(tried)]
        choices[peer] = min(options, key=lambda choice: choice.result.wall_s)
    return Cell(name, nodes, choices, time.perf_counter() - began)


def variants(nodes: int) -> tuple[str, ...]:
    """What is compared at a size, beside colocated."""
    return (*EQUAL_STALENESS, OURS) if SEARCHED < nodes <= EXACT else (*STATIC, OURS)


def _share(nodes: int, variant: str, shares: dict[str, float]) -> int | None:
    """Train nodes by the share found at a smaller size, if one was."""
    return max(1, round(shares[variant] * nodes)) if variant in shares else None


def _best(name: str, nodes: int, variant: str, shares: dict[str, float], starts: set[int]) -> Choice:
    """The best split: by the share found at a smaller size, if the cluster is large; else searched, in short runs from
    nothing or from ``starts`` on, and around what they find in runs of full length, which decide."""
    asked, known = scenario(name, nodes, variant), _share(nodes, variant, shares)
    if nodes > SEARCHED:
        return _choice(asked, known or balanced(_briefly(asked)))
    if not starts:
        brief = _briefly(asked)
        anew = known is None and _times(asked) > 1
        starts = {(search(brief) if anew else climb(brief, known or balanced(brief))).best}
    results: dict[int, Result] = {}
    for start in sorted(starts):
        results |= climb(_fully(asked), start).results
    seen = Search(results)
    count = seen.calmest(CLOSE) if variant == OURS else seen.best
    return Choice(count, seen.results[count])


def _briefly(asked: Scenario) -> Scenario:
    warm_up, steps = _length(asked)
    if asked.workload.drift_per_100_steps == 1:
        warm_up, steps = SEARCH_WARM_UP, SEARCH_STEPS * _times(asked)
    return replace(asked, warm_up=warm_up, stop_after=warm_up + steps)


def _length(asked: Scenario) -> tuple[int, int]:
    if SEARCHED < asked.cluster.size <= EXACT:
        return LARGE_WARM_UP, LARGE_STEPS * _times(asked)
    return WARM_UP, STEPS * _times(asked) if asked.workload.drift_per_100_steps == 1 else DRIFT_STEPS


def _times(asked: Scenario) -> int:
    return FEW_TIMES if asked.policy.groups_per_step * asked.group_size <= FEW else 1


def _choice(asked: Scenario, count: int) -> Choice:
    result = _final(asked, count)
    return Choice(max(1, round(count / result.stands_for)), result)


def _fully(asked: Scenario) -> Scenario:
    warm_up, steps = _length(asked)
    return replace(asked, warm_up=warm_up, stop_after=warm_up + steps)


def _final(asked: Scenario, count: int) -> Result:
    tagged = _fully(split(asked, count))
    return simulate(tagged if asked.cluster.size <= EXACT else shrunk(tagged))


def cohort_error(cell: Cell) -> float:
    """Largest error of the wall clock by cohorts, over the variants of a cell that was simulated exactly."""
    worst = 0.0
    for variant, choice in cell.choices.items():
        asked = scenario(cell.name, cell.nodes, variant)
        again = simulate(shrunk(_fully(split(asked, choice.trainers))))
        worst = max(worst, abs(again.wall_s / choice.result.wall_s - 1))
    return worst


def speed(nodes: int = 10_000, steps: int = 100) -> float:
    """Seconds that the simulation of so many nodes takes."""
    began = time.perf_counter()
    tagged = split(scenario("math-20k-thinking", nodes, OURS), nodes // 3)
    simulate(shrunk(replace(tagged, stop_after=steps)))
    return time.perf_counter() - began


def shares_of(cells: list[Cell], name: str) -> dict[str, float]:
    """Shares of train nodes that were best at the largest searched size."""
    known = [cell for cell in cells if cell.name == name and cell.nodes <= SEARCHED]
    if not known:
        return {}
    largest = max(known, key=lambda cell: cell.nodes)
    return {variant: choice.trainers / largest.nodes for variant, choice in largest.choices.items()}
