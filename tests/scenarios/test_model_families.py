"""The stock OpenAI client against every model family: calls, reasoning, forced calls and second turns, by ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from model_families import FAMILIES, ModelFamily

from proxy.testing import ProxyServer
from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.renderer import Renderer
from workers.engines.script import Play
from workers.engines.scripted import ScriptedEngine

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "7 + 41?"}
CALL = ToolCall("add", '{"a": 7, "b": 41}')
CALLING = [name for name, family in FAMILIES.items() if family.tool_parser != "none"]


class World:
    """One model family behind a proxy; the engine plays what the tests say."""

    def __init__(self, family: ModelFamily, proxy: ProxyServer, engine: ScriptedEngine, renderer: Renderer) -> None:
        self.family, self.proxy, self.engine, self.renderer = family, proxy, engine, renderer
        self.session: dict[str, Any] = {}

    async def client(self, stack: AsyncExitStack) -> openai.AsyncOpenAI:
        self.session = await self.proxy.control.create_session("demo")
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        client = openai.AsyncOpenAI(
            base_url=self.session["base_url"], api_key=self.session["api_key"], max_retries=0, http_client=plain
        )
        stack.push_async_callback(client.close)
        return client

    def written(self, answer: Message) -> tuple[int, ...]:
        """The ids by which the family's own template writes ``answer``, end of turn included."""
        before = self.renderer.text([Message("user", "7 + 41?")], [TOOL], prompt=True)
        text = self.renderer.text([Message("user", "7 + 41?"), answer], [TOOL], prompt=False)
        # A prompt may open a block of reasoning, which the template leaves out again: the model closes it.
        start = before.rstrip().removesuffix("<think>") if before not in text else before
        assert text.startswith(start), (before, text)
        closing = "" if start == before else "</think>"
        body, eos, _ = text[len(start) :].partition(self.renderer.eos_text)
        return tuple(int(token) for token in self.renderer.encode(closing + body + eos))

    async def turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = (await self.proxy.control.session(self.session["session"]))["turns"]
        return turns


Enter = Callable[..., Awaitable[tuple[World, openai.AsyncOpenAI]]]


@pytest.fixture
async def enter(tmp_path: Path) -> AsyncIterator[Enter]:
    async with AsyncExitStack() as stack:

        async def start(name: str) -> tuple[World, openai.AsyncOpenAI]:
            family = FAMILIES[name]
            renderer = Renderer(family.write(tmp_path / "model"))
            engine = await stack.enter_async_context(ScriptedEngine(vocab_size=renderer.vocab_size))
            proxy = await stack.enter_async_context(ProxyServer(tmp_path))
            spec = {
                "run": "demo",
                "model": {"path": str(tmp_path / "model"), "max_context": 4000},
                "data": {"path": "tasks.jsonl"},
                "reward": {"target": "rewards:exact"},
                "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
            }
            await proxy.control.create_run("demo", spec, "digest")
            await proxy.open_route(engine.url)
            world = World(family, proxy, engine, renderer)
            return world, await world.client(stack)

        yield start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CALLING)
async def test_a_call_reaches_the_agent_and_its_result_goes_on_from_the_recorded_ids(enter: Enter, name, stream):
    world, client = await enter(name)
    ids = world.written(Message("assistant", tool_calls=(CALL,)))
    world.engine.add(Play(ids, chunk=3), Play(world.written(Message("assistant", "48"))))
    request: dict[str, Any] = {"model": "demo", "tools": [TOOL]}
    if stream:
        async with client.chat.completions.stream(**request, messages=[USER]) as events:
            message = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(**request, messages=[USER])).choices[0].message
    assert not (message.content or "").strip()
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("add", CALL.arguments)]

    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "48"}
    history = [USER, message.model_dump(exclude_none=True), result]
    assert (await client.chat.completions.create(**request, messages=history)).choices[0].message.content == "48"
    outcomes = [(turn["outcome"], turn["reason"].partition(":")[0]) for turn in await world.turns()]
    if world.family.continues:
        assert outcomes == [("root", ""), ("extend", "")]
        first, second = world.engine.requests
        assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)
    else:
        assert outcomes == [("root", ""), ("fork", "template")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("name", CALLING)
async def test_a_forced_call_begins_in_the_prompt_and_is_read_as_a_whole(enter: Enter, name, choice):
    world, client = await enter(name)
    whole = world.written(Message("assistant", tool_calls=(CALL,)))
    text = world.renderer.raw_text(whole)
    prefix = world.renderer.reading(world.family.tool_parser, "none").calls([TOOL])
    start = prefix.forced_prefix(None if choice == "required" else "add")
    assert start is not None
    rest = text[text.index(start.strip()) + len(start.strip()) :].lstrip() if start.strip() in text else None
    if rest is None:
        # The template writes calls a little differently from what forces one: the model goes on from the prefix.
        rest = CALL.arguments + text[text.index(CALL.arguments) + len(CALL.arguments) :]
        if choice == "required":
            rest = text[text.index("add") :]
    world.engine.add(Play(tuple(int(token) for token in world.renderer.encode(rest))))
    answer = await client.chat.completions.create(model="demo", tools=[TOOL], tool_choice=choice, messages=[USER])
    calls = answer.choices[0].message.tool_calls
    assert calls, (start, rest, answer.choices[0].message.content)
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", CALL.arguments)]
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.reasoning_parser != "none"])
async def test_case_80_reasoning_is_shown_apart_and_its_turn_is_found_whether_the_client_keeps_it_or_not(
    enter: Enter, name, keeps
):
    world, client = await enter(name)
    opening, closing = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}[
        world.family.reasoning_parser
    ]
    prompt = world.renderer.text([Message("user", "7 + 41?")], [TOOL], prompt=True)
    opened = prompt.rstrip().endswith(opening)
    text = ("" if opened else opening) + f"Seven.{closing}48{world.renderer.eos_text}"
    world.engine.add(Play(tuple(int(token) for token in world.renderer.encode(text)), chunk=2))
    world.engine.add(Play(world.written(Message("assistant", "fine"))))
    message = (await client.chat.completions.create(model="demo", tools=[TOOL], messages=[USER])).choices[0].message
    assert (message.content, message.reasoning_content) == ("48", "Seven.")
    said: dict[str, Any] = {"role": "assistant", "content": "48"}
    if keeps:
        said["reasoning_content"] = "Seven."
    history = [USER, said, {"role": "user", "content": "sure?"}]
    await client.chat.completions.create(model="demo", tools=[TOOL], messages=history)
    turns = await world.turns()
    assert turns[1]["outcome"] == ("extend" if world.family.continues else "fork")
