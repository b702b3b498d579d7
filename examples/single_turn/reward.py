"""1 if the answer is word for word what the task wants, and ended by itself."""

from __future__ import annotations

from workers.agents.api import Rollout


def exact(rollout: Rollout) -> float:
    output = rollout.output
    return float(output["finish_reason"] == "stop" and output["content"] == rollout.task["answer"])
