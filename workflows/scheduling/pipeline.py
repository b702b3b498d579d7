"""When to interrupt, what to admit, what is too old: pure functions of the run file.

``multiplexed``: train nodes are pre-empted for each update while the others
keep rolling out. ``naive``: nothing starts while an update is made, and the
next batch starts once every engine has the new weights, so it is on policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workflows.spec import PipelineSpec, RunSpec

ENGINE_PRIORITY = 10
TRAINER_PRIORITY = 100


@dataclass(frozen=True)
class PipelinePolicy:
    """One pipeline's answers."""

    name: str
    steps: int
    groups_per_step: int
    staleness: int
    """Updates between the weights that start a group and the weights that train it, at most."""
    waits_for_sync: bool
    """Whether the next step starts only when every engine serves the new weights."""

    def admit_until(self, step: int, *, ended: int = 0) -> int:
        """Ordinals below this may start while ``step`` (0-based) is being made.

        ``ended``: groups that ended without entering a batch; each is replaced.

        >>> policy(PipelineSpec(steps=10), groups_per_step=4).admit_until(0)
        8
        """
        return min(self.steps, step + 1 + self.staleness) * self.groups_per_step + ended

    def min_version(self, step: int) -> int:
        """Oldest weight version that may have started a group of ``step`` (which trains version ``step``)."""
        return max(0, step - self.staleness)


def policy(pipeline: PipelineSpec, groups_per_step: int) -> PipelinePolicy:
    """The policy that a run file asks for."""
    naive = pipeline.name == "naive"
    return PipelinePolicy(
        name=pipeline.name,
        steps=pipeline.steps,
        groups_per_step=groups_per_step,
        staleness=0 if naive else pipeline.max_staleness,
        waits_for_sync=naive,
    )


def policy_of(spec: RunSpec) -> PipelinePolicy:
    """Shorthand for the policy of a whole run file."""
    return policy(spec.pipeline, spec.algorithm.groups_per_step)


def warning(metrics: Mapping[str, float]) -> str:
    """What is odd about a step with these metrics; empty if nothing is.

    >>> warning({"reward_mean": 0.5, "reward_std": 0.1})
    ''
    """
    if metrics.get("reward_std") != 0:
        return ""
    return (
        f"every sample of the last step had the same reward, {metrics.get('reward_mean', 0):g}: "
        "nothing can be learned from it; is the reward right?"
    )


def train_nodes(spec: RunSpec) -> tuple[str, ...]:
    """Nodes of the run that can train: one gang of all of them."""
    return tuple(sorted(node.id for node in spec.nodes if "train" in node.tags))


def rollout_nodes(spec: RunSpec) -> tuple[str, ...]:
    """Nodes of the run that can roll out."""
    return tuple(sorted(node.id for node in spec.nodes if "rollout" in node.tags))
