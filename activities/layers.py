"""The replaceable layers of a run: its pipeline's policy and its batch selection, built in or the user's own.

Both are called in activities only. A workflow sees a policy's fields, which one activity has read and history keeps, so
that a user's code may change, or be anything but deterministic, without breaking the replay of a run.
"""

from __future__ import annotations

from storage.errors import ConfigError
from workers.agents.targets import load_target
from workflows.messages import PolicyView
from workflows.scheduling import pipeline
from workflows.scheduling.pipeline import PipelinePolicy
from workflows.scheduling.selection import BUILT_IN, Selection
from workflows.spec import RunSpec


def policy_for(spec: RunSpec) -> PipelinePolicy:
    """The policy of a run; :class:`ConfigError` says what is wrong with the user's."""
    target = spec.pipeline.policy
    if target is None:
        return pipeline.policy_of(spec)
    made: PipelinePolicy = load_target(target, spec.code)(spec.pipeline, spec.algorithm.groups_per_step)
    needed = [*PolicyView.model_fields, "admit_until", "min_version", "interrupt", "resume"]
    missing = [name for name in needed if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"pipeline.policy {target!r} returned {type(made).__name__}, which has no {missing[0]!r}")
    if made.trainers == "own" and not pipeline.rollout_nodes(spec, "own"):
        raise ConfigError(f"pipeline.policy {target!r} keeps train nodes from rollout, and there are no others")
    return made


def policy_view(spec: RunSpec) -> PolicyView:
    """The policy's fields."""
    made = policy_for(spec)
    return PolicyView.model_validate({name: getattr(made, name) for name in PolicyView.model_fields})


def selection_for(spec: RunSpec) -> Selection:
    """How a run's batches are selected."""
    name = spec.pipeline.selection
    return BUILT_IN[name] if name in BUILT_IN else load_target(name, spec.code)
