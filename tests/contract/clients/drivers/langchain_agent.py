"""LangChain, streaming: ``langchain_agent.py '[[SCENARIO, [PROMPT, ...]], ...]'``.

A scenario is an API of `make_model` and a function below it, as in ``chat_talk``: ``tool`` is `create_agent`, ``bind``
a loop over `bind_tools`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool


def make_model(api: str) -> Any:
    """The model finds its address and key in the environment."""
    if api == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="any", max_retries=0, streaming=True)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="any", max_retries=0, streaming=True, use_responses_api=api == "responses")


@as_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def talk(model: Any, prompts: list[str]) -> list[str]:
    messages: list[Any] = []
    answers = []
    for prompt in prompts:
        messages.append(HumanMessage(prompt))
        answer = None
        for chunk in model.stream(messages):
            answer = chunk if answer is None else answer + chunk
        messages.append(answer)
        answers.append(answer.text)
    return answers


def bind(model: Any, prompts: list[str]) -> list[str]:
    bound = model.bind_tools([add])
    messages: list[Any] = [HumanMessage(prompts[0])]
    while True:
        answer = bound.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return [answer.text]
        messages += [ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]


def tool(model: Any, prompts: list[str]) -> list[str]:
    agent = create_agent(model, [add], system_prompt="Use the tool.")
    pieces: list[str] = []
    state: dict[str, Any] = {}
    for mode, item in agent.stream({"messages": [HumanMessage(prompts[0])]}, stream_mode=["messages", "values"]):
        if mode == "values":
            state = item
        elif item[0].type == "AIMessageChunk":
            pieces.append(item[0].text)
    answer = state["messages"][-1].text
    assert "".join(pieces).endswith(answer)
    return [answer]


if __name__ == "__main__":
    steps = [(*scenario.split("_"), prompts) for scenario, prompts in json.loads(sys.argv[1])]
    print(json.dumps([globals()[word](make_model(api), prompts) for api, word, prompts in steps]))
