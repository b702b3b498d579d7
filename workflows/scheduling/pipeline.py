"""Pipelines as values: who trains, what may start, what is too old, what may overlap. Pure functions of the run file.

======================  =======  ========  ======  =====  ==========
pipeline                trains   rollout   waits   parts  staleness
======================  =======  ========  ======  =====  ==========
``colocated``           preempt  held      yes     no     0
``disaggregated``       own      held      yes     no     0
``micro_batch``         own      goes on   yes     yes    0
``off_policy``          own      goes on   no      no     the run's
``multiplexed``         preempt  goes on   no      no     the run's
======================  =======  ========  ======  =====  ==========

The workflows, the activities and the simulator ask the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workflows.scheduling import triggers
from workflows.scheduling.decision import Decision
from workflows.scheduling.triggers import RolloutFacts
from workflows.spec import PipelineSpec, RunSpec

ENGINE_PRIORITY = 10
COMPANION_PRIORITY = 50
TRAINER_PRIORITY = 100
DEFAULT_STALENESS = 1


@dataclass(frozen=True)
class PipelinePolicy:
    """One pipeline's answers. A user's policy has the same fields and methods (``pipeline.policy`` of the run file)."""

    name: str
    steps: int
    groups_per_step: int
    staleness: int
    """Updates between the weights that start a group and the weights that train it, at most."""
    trainers: Literal["preempt", "own"] = "preempt"
    """``preempt``: training takes the train nodes from rollout for each update. ``own``: they never roll out."""
    holds_rollout: bool = False
    """Whether rollout stops everywhere while an update is made."""
    waits_for_sync: bool = False
    """Whether the next step starts only when every engine serves the new weights."""
    accumulates: bool = False
    """Whether gradients are accumulated as groups complete, before the batch is whole."""

    def admit_until(self, step: int, ended: int = 0) -> int:
        """Ordinals below this may start while ``step`` (0-based) is being made.

        ``ended``: groups that ended without entering a batch; each is replaced.

        >>> policy(PipelineSpec(steps=10), groups_per_step=4).admit_until(0)
        8
        """
        return min(self.steps, step + 1 + self.staleness) * self.groups_per_step + ended

    def min_version(self, step: int) -> int:
        """Oldest weight version that may have started a group of ``step`` (which trains version ``step``)."""
        return max(0, step - self.staleness)

    def interrupt(self, facts: RolloutFacts) -> Decision | None:
        """Whether rollout is interrupted now, why, and what for; see :mod:`workflows.scheduling.triggers`."""
        return triggers.interrupt(facts)

    def resume(self, facts: RolloutFacts) -> Decision | None:
        """Whether a node that does not roll out begins now, and why."""
        return triggers.resume(facts)


def policy(pipeline: PipelineSpec, groups_per_step: int) -> PipelinePolicy:
    """The built-in pipeline that a run file names."""
    off_policy = DEFAULT_STALENESS if pipeline.max_staleness is None else pipeline.max_staleness
    on_policy = pipeline.name in ("colocated", "disaggregated", "micro_batch")
    return PipelinePolicy(
        name=pipeline.name,
        steps=pipeline.steps,
        groups_per_step=groups_per_step,
        staleness=0 if on_policy else off_policy,
        trainers="preempt" if pipeline.name in ("colocated", "multiplexed") else "own",
        holds_rollout=pipeline.name in ("colocated", "disaggregated"),
        waits_for_sync=on_policy,
        accumulates=pipeline.accumulates,
    )


def policy_of(spec: RunSpec) -> PipelinePolicy:
    """Shorthand for the built-in policy of a whole run file."""
    return policy(spec.pipeline, spec.algorithm.groups_per_step)


def train_nodes(spec: RunSpec) -> tuple[str, ...]:
    """Nodes of the run that can train: one gang of all of them."""
    return tuple(sorted(node.id for node in spec.nodes if "train" in node.tags))


def companion_nodes(spec: RunSpec) -> tuple[str, ...]:
    """Nodes that the run keeps for a reference or a critic."""
    apart = set(spec.algorithm.companions_apart)
    return tuple(sorted(node.id for node in spec.nodes if apart & node.tags))


def trainer_ranks(spec: RunSpec) -> int:
    """Ranks of the run's trainer gang."""
    return sum(node.ranks for node in spec.nodes if "train" in node.tags)


def rollout_nodes(spec: RunSpec, trainers: Literal["preempt", "own"] = "preempt") -> tuple[str, ...]:
    """Nodes of the run that roll out; without its train nodes where the pipeline keeps these to itself, and without
    those of a reference or critic apart."""
    kept = (*(train_nodes(spec) if trainers == "own" else ()), *companion_nodes(spec))
    return tuple(sorted(node.id for node in spec.nodes if "rollout" in node.tags and node.id not in kept))
