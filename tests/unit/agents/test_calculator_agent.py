"""The demo's agent, on the stock OpenAI SDK, against an OpenAI-compatible server; and what it earns."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from examples.calculator import agent
from examples.calculator.agent import run
from examples.calculator.make_tasks import make_tasks
from examples.calculator.reward import exact, graded
from workers.agents.api import Llm, Rollout

Start = Callable[[Callable[[dict[str, Any]], dict[str, Any]]], Awaitable[Any]]
TASK = {"question": "What is 99 minus 55?", "tool": "sub", "a": 99, "b": 55, "answer": 44}


@pytest.fixture(autouse=True)
def new_client() -> Iterator[None]:
    """The shared client belongs to one event loop, and each test has its own."""
    agent.shared_client.cache_clear()
    yield
    agent.shared_client.cache_clear()


def calls(tool: str, a: int, b: int) -> dict[str, Any]:
    return {"tool_calls": [(tool, json.dumps({"a": a, "b": b}))]}


def knows_the_way(body: dict[str, Any]) -> dict[str, Any]:
    """Calls the tool for the last question, then states the result."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": f"The answer is {last['content']}."}
    a, b = map(int, re.findall(r"\d+", last["content"]))
    return calls("sub", a, b)


async def session(server: Any, task: dict[str, Any] = TASK, **options: Any) -> Any:
    llm = Llm(server.url, "sfs_key", "policy")
    output = await run(task, llm, **options)
    await agent.shared_client().close()
    return output


async def test_it_calls_the_tool_and_states_the_result(openai_server: Start) -> None:
    server = await openai_server(knows_the_way)
    output = await session(server)
    assert output["calls"] == [[{"tool": "sub", "a": 99, "b": 55}]]
    assert (output["answer"], output["finish_reason"]) == ("The answer is 44.", "stop")


async def test_it_speaks_the_tools_protocol(openai_server: Start) -> None:
    server = await openai_server(knows_the_way)
    await session(server, system="You call a calculator.", max_tokens=(20, 12))
    first, second = server.requests
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    call = second["messages"][2]["tool_calls"][0]
    assert call["function"]["name"] == "sub"
    assert json.loads(call["function"]["arguments"]) == {"a": 99, "b": 55}
    assert second["messages"][3] == {"role": "tool", "tool_call_id": call["id"], "content": "44"}
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "sub", "mul"]
    assert first["stream"] is True
    assert (first["max_completion_tokens"], second["max_completion_tokens"]) == (20, 12)
    assert server.keys == ["sfs_key", "sfs_key"]


async def test_an_example_episode_stands_in_front_of_the_question(openai_server: Start) -> None:
    server = await openai_server(knows_the_way)
    example = {"question": "What is 7 plus 41?", "tool": "add", "a": 7, "b": 41, "answer": "The answer is 48."}
    await session(server, example=example)
    messages = server.requests[0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[2]["content"] == "48"


async def test_an_answer_without_a_call_ends_the_episode(openai_server: Start) -> None:
    server = await openai_server(lambda body: {"content": "99 - 55 = 45"})
    output = await session(server)
    assert output == {"calls": [], "answer": "99 - 55 = 45", "finish_reason": "stop"}
    assert len(server.requests) == 1


async def test_an_agent_that_only_calls_ends_with_its_turns(openai_server: Start) -> None:
    server = await openai_server(lambda body: calls("add", 1, 2))
    output = await session(server)
    assert len(output["calls"]) == 2
    assert output["answer"] is None


async def test_results_can_be_padded(openai_server: Start) -> None:
    server = await openai_server(knows_the_way)
    output = await session(server, {"question": "9-5"}, result_width=2)
    assert output["answer"] == "The answer is 04."


def rollout(first: list[dict[str, Any]] | None, said: str | None, reason: str = "stop", **task: Any) -> Rollout:
    output = {"calls": [] if first is None else [first], "answer": said, "finish_reason": reason}
    return Rollout(TASK | task, output, [])


RIGHT = {"tool": "sub", "a": 99, "b": 55}
WRONG = {"tool": "sub", "a": 55, "b": 99}


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (rollout(None, "44"), 0.0),
        (rollout([RIGHT, RIGHT], "44"), 0.0),
        (rollout([WRONG], "The answer is -44."), 0.2),
        (rollout([RIGHT], "I do not know."), 0.6),
        (rollout([RIGHT], "99 minus 55 is 44."), 0.6),
        (rollout([RIGHT], "The answer is 44", "length"), 0.6),
        (rollout([RIGHT], None, "tool_calls"), 0.6),
        (rollout([RIGHT], "The answer is 44."), 1.0),
        (rollout([{"tool": "sub", "a": 3, "b": 5}], "-2", a=3, b=5, answer=-2), 1.0),
    ],
)
def test_graded_reward(given: Rollout, reward: float) -> None:
    assert graded(given) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (rollout([RIGHT], "44", answer="44"), 1.0),
        (rollout([RIGHT], "The answer is 44.", answer="44"), 0.0),
        (rollout([RIGHT], "44", "length", answer="44"), 0.0),
        (rollout([WRONG], "44", answer="44"), 0.0),
        (rollout(None, "44", answer="44"), 0.0),
        (rollout([RIGHT], None, "tool_calls", answer="44"), 0.0),
    ],
)
def test_exact_reward(given: Rollout, reward: float) -> None:
    assert exact(given) == reward


def test_tasks_follow_from_the_seed_and_are_all_different() -> None:
    tasks = make_tasks(200, 0)
    assert tasks == make_tasks(200, 0)
    assert tasks != make_tasks(200, 1)
    assert len({task["question"] for task in tasks}) == 200
    assert all(2 <= number <= 99 for task in tasks for number in (task["a"], task["b"]))
