"""The `anthropic` SDK, streaming: ``anthropic_sdk.py '[[SCENARIO, [PROMPT, ...]], ...]'``.

A scenario is a function below.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

client = anthropic.Anthropic(max_retries=0)  # finds ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
SYSTEM: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def ask(messages: list[Any], **options: Any) -> Any:
    """One answer, put at the end of ``messages``; what its prompt counts is asked for first."""
    counted = client.messages.count_tokens(model="any", system=SYSTEM, messages=messages, **options)
    with client.messages.stream(model="any", max_tokens=200, system=SYSTEM, messages=messages, **options) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    assert counted.input_tokens == message.usage.input_tokens
    messages.append({"role": "assistant", "content": message.content})
    return message


def talk(prompts: list[str]) -> list[str]:
    messages: list[Any] = []
    answers = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        answers.append(ask(messages).content[0].text)
    return answers


def tool(prompts: list[str]) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": prompts[0]}]
    while (message := ask(messages, tools=[ADD])).stop_reason == "tool_use":
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return [message.content[0].text]


if __name__ == "__main__":
    print(json.dumps([globals()[scenario](prompts) for scenario, prompts in json.loads(sys.argv[1])]))
