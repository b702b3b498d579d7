"""When rollout is interrupted and when it begins again: pure decisions of the rollout manager.

To interrupt: the tag ``rollout`` is taken away, new weights are published, enough groups are complete, or the time
limit of a step has passed. To resume: the tag is back, or the node is. The caller says what it knows, no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workflows.scheduling.decision import Decision

RELEASE, SYNC, UPDATE, ROLL_OUT = "end rollout", "load weights", "make an update", "roll out"
"""What decisions of this module order."""


@dataclass(frozen=True)
class RolloutFacts:
    """What is known of the batch that a step waits for, and of one node. Built by whoever has to decide."""

    ready: int = 0
    """Complete groups that the step may train."""
    wanted: int = 1
    """Groups of a step."""
    waited_s: float = 0.0
    """Since the step began to wait."""
    time_limit_s: float = math.inf
    node: str = ""
    tagged: bool = True
    """Whether the node is meant to roll out: it has the tag, and nobody took it away."""
    up: bool = True
    """Whether the node answers."""
    rolls_out: bool = True
    """Whether it rolls out now."""
    lost: bool = False
    """Whether it stopped because it was lost."""
    serves: int = 0
    """Weight version of its engine."""
    newest: int = 0
    """Newest published version."""


def interrupt(facts: RolloutFacts) -> Decision | None:
    """Why rollout has to stop, the strongest reason first; None: it goes on.

    >>> interrupt(RolloutFacts(ready=8, wanted=8)).what
    'make an update'
    """
    if facts.rolls_out and not facts.tagged:
        return Decision(what=RELEASE, why=f"the tag rollout was taken from node {facts.node}")
    if facts.rolls_out and facts.newest > facts.serves:
        versions = {"serves": float(facts.serves), "newest": float(facts.newest)}
        return Decision(what=SYNC, why=f"version {facts.newest} is published", facts=versions)
    groups = {"ready": float(facts.ready), "wanted": float(facts.wanted), "waited_s": round(facts.waited_s, 3)}
    if facts.ready >= facts.wanted:
        return Decision(what=UPDATE, why=f"{facts.ready} groups are complete, {facts.wanted} make a step", facts=groups)
    if facts.ready > 0 and facts.waited_s > facts.time_limit_s:
        why = f"the time limit of {facts.time_limit_s:g} s has passed with {facts.ready} of {facts.wanted} groups"
        return Decision(what=UPDATE, why=why, facts=groups)
    return None


def resume(facts: RolloutFacts) -> Decision | None:
    """Why a node that does not roll out begins to; None: it stays as it is.

    >>> resume(RolloutFacts(node="b", rolls_out=False, lost=True)).why
    'node b is back'
    """
    if facts.rolls_out or not facts.tagged or not facts.up:
        return None
    why = f"node {facts.node} is back" if facts.lost else f"node {facts.node} has the tag rollout and is free"
    return Decision(what=ROLL_OUT, why=why)
