"""OpenAI's Agents SDK, streaming: ``agents_sdk.py '[[SCENARIO, [PROMPT, ...]], ...]'``.

A scenario is an API (``chat``, ``responses``, or ``chained``: responses by ``previous_response_id``) and a function
below, as in ``chat_talk``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def run(agent: Any, items: Any, **options: Any) -> Any:
    """One run of the agent, read from its event stream."""
    result = Runner.run_streamed(agent, items, **options)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces).endswith(result.final_output)
    return result


async def talk(agent: Any, prompts: list[str], *, chained: bool) -> list[str]:
    items: list[Any] = []
    previous, answers = None, []
    for prompt in prompts:
        items.append({"role": "user", "content": prompt})
        options = {"previous_response_id": previous} if chained else {}
        result = await run(agent, items, **options)
        previous = result.last_response_id
        items = [] if chained else result.to_input_list()
        answers.append(result.final_output)
    return answers


async def tool(agent: Any, prompts: list[str], *, chained: bool) -> list[str]:
    options = {"auto_previous_response_id": True} if chained else {}
    return [(await run(agent.clone(tools=[add]), prompts[0], **options)).final_output]


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(max_retries=0)  # finds OPENAI_BASE_URL and OPENAI_API_KEY
    answers = []
    for scenario, prompts in json.loads(sys.argv[1]):
        api, word = scenario.split("_")
        kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
        agent = Agent("adder", instructions="Be brief.", model=kind("any", client))
        answers.append(await globals()[word](agent, prompts, chained=api == "chained"))
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main())
