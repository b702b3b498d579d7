"""smolagents, streaming: ``smolagents_agent.py '[[SCENARIO, [PROMPT, ...]], ...]'``; a scenario is a function below."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent
from smolagents import tool as as_tool

model = OpenAIServerModel(
    "any",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    client_kwargs={"max_retries": 0},
    retry=False,
)


@as_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def talk(prompts: list[str]) -> list[str]:
    messages: list[Any] = []
    answers = []
    for prompt in prompts:
        messages.append({"role": "user", "content": [{"type": "text", "text": prompt}]})
        answers.append("".join(delta.content or "" for delta in model.generate_stream(messages)))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answers[-1]}]})
    return answers


def tool(prompts: list[str]) -> list[str]:
    agent = ToolCallingAgent(tools=[add], model=model, stream_outputs=True, max_steps=3, verbosity_level=LogLevel.OFF)
    return [str(agent.run(prompts[0]))]


def code(prompts: list[str]) -> list[str]:
    """The model writes Python that calls the tool."""
    agent = CodeAgent(tools=[add], model=model, stream_outputs=True, max_steps=3, verbosity_level=LogLevel.OFF)
    return [str(agent.run(prompts[0]))]


if __name__ == "__main__":
    answers = [globals()[scenario](prompts) for scenario, prompts in json.loads(sys.argv[1])]
    print()  # the agent's own display does not end its last line
    print(json.dumps(answers))
