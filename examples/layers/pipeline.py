"""A pipeline of your own: ``pipeline: {policy: examples.layers.pipeline:patient}``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workflows.scheduling import pipeline
from workflows.scheduling.decision import Decision
from workflows.scheduling.pipeline import PipelinePolicy
from workflows.scheduling.triggers import UPDATE, RolloutFacts
from workflows.spec import PipelineSpec

GRACE_S = 30.0


@dataclass(frozen=True)
class Patient(PipelinePolicy):
    """Off policy in its first half, on policy in its second; takes a batch that is nearly complete after a while."""

    def admit_until(self, step: int, ended: int = 0) -> int:
        late = 2 * step >= self.steps
        return (replace(self, staleness=0) if late else self)._admit(step, ended)

    def interrupt(self, facts: RolloutFacts) -> Decision | None:
        if facts.waited_s > GRACE_S and 4 * facts.ready >= 3 * facts.wanted:
            return Decision(what=UPDATE, why=f"three quarters of the batch are complete after {GRACE_S:g} s")
        return super().interrupt(facts)

    def _admit(self, step: int, ended: int) -> int:
        return super().admit_until(step, ended)


def patient(spec: PipelineSpec, groups_per_step: int) -> Patient:
    """The named pipeline of the run file, with two of its answers changed."""
    return Patient(**vars(pipeline.policy(spec, groups_per_step)))
