"""The `openai` SDK, streaming: ``openai_sdk.py '[[SCENARIO, [PROMPT, ...]], ...]'``; a scenario is a function below."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

client = openai.OpenAI(max_retries=0)  # finds OPENAI_BASE_URL and OPENAI_API_KEY
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


def chat(messages: list[Any], **options: Any) -> Any:
    """One answer, put at the end of ``messages``."""
    with client.chat.completions.stream(model="any", messages=messages, **options) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert "".join(pieces) == (message.content or "")
    messages.append(message)
    return message


def chat_talk(prompts: list[str]) -> list[str]:
    messages: list[Any] = []
    answers = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        answers.append(chat(messages).content)
    return answers


def chat_tool(prompts: list[str]) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": prompts[0]}]
    tools = [{"type": "function", "function": ADD}]
    while calls := chat(messages, tools=tools).tool_calls:
        for call in calls:
            total = str(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    return [messages[-1].content]


def completions_talk(prompts: list[str]) -> list[str]:
    text, answers = "", []
    for prompt in prompts:
        text += prompt
        chunks = client.completions.create(model="any", prompt=text, stream=True, max_tokens=50)
        answers.append("".join(chunk.choices[0].text for chunk in chunks))
        text += answers[-1]
    return answers


def respond(items: list[Any], **options: Any) -> Any:
    with client.responses.stream(model="any", input=items, **options) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert "".join(pieces) == response.output_text
    return response


def responses_talk(prompts: list[str]) -> list[str]:
    items: list[Any] = []
    answers = []
    for prompt in prompts:
        items.append({"role": "user", "content": prompt})
        response = respond(items, store=False)
        items += response.output
        answers.append(response.output_text)
    return answers


def responses_tool(prompts: list[str]) -> list[str]:
    items: list[Any] = [{"role": "user", "content": prompts[0]}]
    while True:
        response = respond(items, tools=[{"type": "function", **ADD}], store=False)
        items += response.output
        results = tool_results(response)
        if not results:
            return [response.output_text]
        items += results


def chained_talk(prompts: list[str]) -> list[str]:
    previous, answers = None, []
    for prompt in prompts:
        response = respond([{"role": "user", "content": prompt}], previous_response_id=previous)
        previous = response.id
        answers.append(response.output_text)
    return answers


def chained_tool(prompts: list[str]) -> list[str]:
    previous, items = None, [{"role": "user", "content": prompts[0]}]
    while items:
        response = respond(items, previous_response_id=previous, tools=[{"type": "function", **ADD}])
        previous, items = response.id, tool_results(response)
    return [response.output_text]


def tool_results(response: Any) -> list[Any]:
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(sum(json.loads(item.arguments).values())),
        }
        for item in response.output
        if item.type == "function_call"
    ]


if __name__ == "__main__":
    print(json.dumps([globals()[scenario](prompts) for scenario, prompts in json.loads(sys.argv[1])]))
