"""The built-in agent: prompts in, answers out, no code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from examples.single_turn.reward import exact
from workers.agents.api import Rollout
from workers.agents.outcome import Outcome
from workers.agents.single_turn import SingleTurn

Start = Callable[[Callable[[dict[str, Any]], dict[str, Any]]], Awaitable[Any]]


@pytest.fixture
async def agent() -> AsyncIterator[SingleTurn]:
    made = SingleTurn()
    yield made
    await made.close()


async def ask(agent: SingleTurn, url: str, limit_s: float = 30.0, **task: Any) -> Outcome:
    return await agent.run("s1", {"task": task, "llm": {"base_url": url, "api_key": "k", "model": "policy"}}, limit_s)


async def test_a_prompt_becomes_one_user_message(openai_server: Start, agent: SingleTurn) -> None:
    server = await openai_server(lambda body: {"content": "add(3,4)"})
    outcome = await ask(agent, server.url, prompt="3+4")
    assert outcome == Outcome("ok", {"content": "add(3,4)", "finish_reason": "stop"})
    assert server.requests == [{"model": "policy", "messages": [{"role": "user", "content": "3+4"}]}]
    assert exact(Rollout({"answer": "add(3,4)"}, outcome.value, [])) == 1.0


async def test_messages_are_sent_as_they_are(openai_server: Start, agent: SingleTurn) -> None:
    server = await openai_server(lambda body: {"content": "x", "finish_reason": "length"})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    outcome = await ask(agent, server.url, messages=messages)
    assert server.requests[0]["messages"] == messages
    assert exact(Rollout({"answer": "x"}, outcome.value, [])) == 0.0


async def test_a_task_without_a_prompt_is_an_error_of_the_data(agent: SingleTurn) -> None:
    outcome = await ask(agent, "http://127.0.0.1:1/v1", question="3+4")
    assert outcome.status == "error"
    assert "prompt" in outcome.detail


@pytest.mark.parametrize(("status", "expected"), [(500, "infra"), (503, "infra"), (504, "infra"), (400, "error")])
async def test_server_faults_are_infrastructure_and_refusals_are_not(
    openai_server: Start, agent: SingleTurn, status: int, expected: str
) -> None:
    server = await openai_server(lambda body: {"status": status})
    assert (await ask(agent, server.url, prompt="3+4")).status == expected


async def test_a_proxy_that_is_away_is_infrastructure(agent: SingleTurn, unused_tcp_port: int) -> None:
    assert (await ask(agent, f"http://127.0.0.1:{unused_tcp_port}/v1", prompt="3+4")).status == "infra"
