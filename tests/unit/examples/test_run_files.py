"""The run files in examples/ are valid, and say what the demos are known for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.runfile import load_run
from workers.agents.data import TaskSource
from workers.agents.runners import agent_runner, reward_runner
from workers.agents.single_turn import messages_of
from workers.agents.targets import load_target
from workers.trainer.usercode import load_user_code
from workflows.spec import RunSpec

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("demo", "demo-tiny", "single-turn", "custom-algorithm")


def load(name: str) -> RunSpec:
    return load_run(EXAMPLES / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_file_is_valid_and_its_code_can_be_loaded(name: str) -> None:
    spec = load(name)
    assert spec.run == name
    assert callable(load_target(spec.reward.target, spec.code))
    if spec.agent.kind == "python":
        assert callable(load_target(spec.agent.target or "", spec.code))
    load_user_code(spec)
    agent_runner(spec)
    reward_runner(spec)


@pytest.mark.parametrize("name", NAMES)
def test_one_node_trains_and_both_roll_out_each_on_its_own_core(name: str) -> None:
    first, second = load(name).nodes
    assert (first.tags, second.tags) == ({"rollout", "train"}, {"rollout"})
    assert {*first.cores} & {*second.cores} == set()


@pytest.mark.parametrize("name", ["demo", "demo-tiny"])
def test_prompts_and_answers_fit_the_context(name: str) -> None:
    spec = load(name)
    longest_prompt = {"demo": 180, "demo-tiny": 40}[name]
    assert longest_prompt + spec.sampling.max_tokens <= spec.model.max_context
    assert max(spec.agent.options["max_tokens"]) <= spec.sampling.max_tokens
    assert len(spec.agent.options["max_tokens"]) == spec.agent.max_turns


def test_the_prompts_of_the_single_turn_example_are_prompts() -> None:
    source = TaskSource(Path(load("single-turn").data.path))
    assert list(source.problems()) == []
    assert all(messages_of(source.task(ordinal)) for ordinal in range(source.length))
