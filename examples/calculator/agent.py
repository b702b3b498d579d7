"""A calculator agent on the stock OpenAI SDK: ask, run the tool that the model calls, hand the result back.

It knows nothing of training. Streaming is on, tools go over the wire in OpenAI's own format, and it works as well
against any other server that speaks that protocol.
"""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from openai import AsyncOpenAI

from workers.agents.api import Llm

OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name, description in (("add", "a plus b"), ("sub", "a minus b"), ("mul", "a times b"))
]


@dataclass
class Answer:
    """One streamed answer, put together. ``calls`` are tool calls as a message carries them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        """The assistant message to send back with the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        return message | {"tool_calls": self.calls} if self.calls else message


async def run(
    task: dict[str, Any],
    llm: Llm,
    *,
    system: str | None = None,
    example: dict[str, Any] | None = None,
    result_width: int = 1,
    max_tokens: Sequence[int] = (64, 64),
) -> dict[str, Any]:
    """Work on ``task["question"]``; one turn for each entry of ``max_tokens``.

    ``example`` is an episode shown first: ``{question, tool, a, b, answer}``. Results are padded with zeros to
    ``result_width``. Returns ``{"calls": [[{tool, a, b}], ...], "answer": str | None, "finish_reason": str}``: the
    calls of each turn that called, and the text of the turn that did not.
    """
    client = shared_client().with_options(base_url=llm.base_url, api_key=llm.api_key)
    messages = opening(task["question"], system, example, result_width)
    calls: list[list[dict[str, Any]]] = []
    for limit in max_tokens:
        answer = await ask(client, llm.model, messages, limit)
        if not answer.calls:
            return {"calls": calls, "answer": answer.content, "finish_reason": answer.finish_reason}
        messages.append(answer.message())
        calls.append([read_call(call) for call in answer.calls])
        messages += [tool_message(call, calculate(read_call(call), result_width)) for call in answer.calls]
    return {"calls": calls, "answer": None, "finish_reason": answer.finish_reason}


@cache
def shared_client() -> AsyncOpenAI:
    """One client, and so one connection pool, per process: a client of its own costs a session 30 ms of CPU."""
    return AsyncOpenAI(base_url="http://set.per.session", api_key="set per session")


async def ask(client: AsyncOpenAI, model: str, messages: Sequence[Any], limit: int) -> Answer:
    """One streamed request."""
    stream: AsyncIterator[Any] = await client.chat.completions.create(
        model=model, messages=list(messages), tools=TOOLS, max_completion_tokens=limit, stream=True
    )
    answer = Answer()
    async for chunk in stream:
        for choice in chunk.choices:
            answer.content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                add_part(answer.calls, part)
            answer.finish_reason = choice.finish_reason or answer.finish_reason
    return answer


def add_part(calls: list[dict[str, Any]], part: Any) -> None:
    """Put a streamed piece of a tool call where it belongs: the first has id and name, the others more arguments."""
    if part.index == len(calls):
        calls.append({"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}})
    calls[part.index]["function"]["arguments"] += part.function.arguments or ""


def opening(
    question: str, system: str | None, example: dict[str, Any] | None, result_width: int
) -> list[dict[str, Any]]:
    """The messages of the first request."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if example:
        arguments = json.dumps({"a": example["a"], "b": example["b"]})
        call = {"id": "example", "type": "function", "function": {"name": example["tool"], "arguments": arguments}}
        messages += [
            {"role": "user", "content": example["question"]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            tool_message(call, calculate(read_call(call), result_width)),
            {"role": "assistant", "content": example["answer"]},
        ]
    return [*messages, {"role": "user", "content": question}]


def read_call(call: dict[str, Any]) -> dict[str, Any]:
    """``{"tool", "a", "b"}`` of a tool call."""
    arguments = json.loads(call["function"]["arguments"])
    return {"tool": call["function"]["name"], "a": arguments["a"], "b": arguments["b"]}


def calculate(call: dict[str, Any], width: int) -> str:
    """What the tool answers."""
    return f"{OPERATIONS[call['tool']](call['a'], call['b']):0{width}d}"


def tool_message(call: dict[str, Any], result: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": result}
