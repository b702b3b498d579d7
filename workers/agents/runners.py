"""The runner that a run file asks for."""

from __future__ import annotations

from workers.agents.command import CommandAgent, CommandReward
from workers.agents.outcome import Runner
from workers.agents.pool import ProcessPool, Setup
from workers.agents.single_turn import SingleTurn
from workflows.spec import RunSpec


def agent_runner(spec: RunSpec) -> Runner:
    """Runs sessions; its payloads are ``{"task", "llm": {"base_url", "api_key", "model"}}``."""
    agent = spec.agent
    if agent.kind == "single_turn":
        return SingleTurn()
    target = agent.target or ""
    if agent.kind == "command":
        return CommandAgent(target, spec.code)
    return ProcessPool(Setup("agent", target, spec.code, agent.options), agent.processes)


def reward_runner(spec: RunSpec) -> Runner:
    """Scores rollouts; its payloads are ``{"task", "output", "turns"}``, its values finite floats."""
    if spec.reward.kind == "command":
        return CommandReward(spec.reward.target, spec.code)
    return ProcessPool(Setup("reward", spec.reward.target, spec.code))
