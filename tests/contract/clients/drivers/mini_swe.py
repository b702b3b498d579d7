"""mini-swe-agent in the current folder: ``mini_swe.py '[[SCENARIO, [PROMPT]], ...]'``; a scenario is a function below.

Its models do not stream; litellm below them can, and does so by itself in two more scenarios.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import litellm
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model


def run(name: str, config_file: str, prompt: str, **options: Any) -> list[str]:
    config = yaml.safe_load(Path(builtin_config_dir / config_file).read_text())
    # litellm finds OPENAI_BASE_URL and OPENAI_API_KEY, or those of Anthropic, by the prefix of the name.
    model_config = config["model"] | {"model_kwargs": {"drop_params": True, "max_retries": 0}} | options
    model = get_model(name, model_config)
    settings = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(cwd=os.getcwd()), step_limit=5, **settings)
    return [agent.run(prompt)["submission"].strip()]


def tool(prompts: list[str]) -> list[str]:
    """The default: the model has one tool, bash."""
    return run("openai/any", "mini.yaml", prompts[0])


def text(prompts: list[str]) -> list[str]:
    """The command stands in a block of the answer."""
    return run("openai/any", "mini_textbased.yaml", prompts[0], model_class="litellm_textbased")


def anthropic(prompts: list[str]) -> list[str]:
    """The tool, through the Anthropic API."""
    return run("anthropic/any", "mini.yaml", prompts[0])


def responses(prompts: list[str]) -> list[str]:
    """The tool, through the Responses API."""
    return run("openai/any", "mini.yaml", prompts[0], model_class="litellm_response")


def talk(name: str, prompts: list[str]) -> list[str]:
    messages: list[Any] = []
    answers = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        chunks = list(litellm.completion(model=name, messages=messages, stream=True, max_tokens=200, max_retries=0))
        message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        messages.append(message.model_dump())
        answers.append(message.content)
    return answers


def litellm_chat(prompts: list[str]) -> list[str]:
    return talk("openai/any", prompts)


def litellm_anthropic(prompts: list[str]) -> list[str]:
    return talk("anthropic/any", prompts)


if __name__ == "__main__":
    print(json.dumps([globals()[scenario](prompts) for scenario, prompts in json.loads(sys.argv[1])]))
