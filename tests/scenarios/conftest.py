"""Harness of the scenarios: a real proxy and a scripted engine over HTTP, and the stock OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.testing import ProxyServer, write_toy_model
from workers.engines.scripted import ScriptedEngine

ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Bench:
    """One proxy, one engine, one run; sessions and clients on demand."""

    def __init__(self, folder: Path, proxy: ProxyServer, engine: ScriptedEngine, spec: dict[str, Any]) -> None:
        self.folder = folder
        self.proxy = proxy
        self.engine = engine
        self.spec = spec
        self.session: dict[str, Any] = {}
        self._clients: list[openai.AsyncOpenAI] = []

    async def client(self, **options: Any) -> openai.AsyncOpenAI:
        """A client of a new session; `self.session` is its id and key."""
        self.session = await self.proxy.control.create_session("demo")
        return self.client_of(self.session, **options)

    def client_of(self, session: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
        # Loading certificate authorities takes longer than most scenarios; there is no TLS here.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": 20, "http_client": plain, **options}
        base_url = f"{self.proxy.url}/s/{session['session']}/v1"
        client = openai.AsyncOpenAI(base_url=base_url, api_key=session["api_key"], **options)
        self._clients.append(client)
        return client

    async def ask(self, **request: Any) -> Any:
        """One request in a session of its own."""
        client = await self.client()
        return await client.chat.completions.create(**{"model": "any", "messages": USER, **request})

    async def read(self, stream: Any) -> list[Any]:
        """All chunks of a stream."""
        return [chunk async for chunk in stream]

    async def inspect(self) -> dict[str, Any]:
        """The session as the control API shows it."""
        return await self.proxy.control.session(self.session["session"])

    async def turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = (await self.inspect())["turns"]
        return turns

    async def recorded(self) -> Any:
        """The session's state inside the proxy: ids, log-probs, tree."""
        return (await self.proxy.service.sessions.get(self.session["session"])).session

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def run_spec(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run file for the toy model; `changes` are merged section by section."""
    spec: dict[str, Any] = {
        "run": "demo",
        "model": {"path": str(folder / "model"), "max_context": 400, "tool_parser": "hermes"},
        "data": {"path": "tasks.jsonl"},
        "reward": {"target": "rewards:exact"},
        "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        "pipeline": {"hold_limit_s": 10.0},
    }
    for section, values in changes.items():
        spec[section] = {**spec.get(section, {}), **values} if isinstance(values, dict) else values
    return spec


USER = [{"role": "user", "content": "hi"}]
StartBench = Callable[..., Awaitable[Bench]]


async def eventually(condition: Callable[[], Any], what: str, limit_s: float = 10.0) -> None:
    """Wait until `condition()` is true; `what` names it when it never is."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110  # the condition is about another process's state
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"never happened: {what}")


@pytest.fixture
def until() -> Any:
    return eventually


@pytest.fixture
async def start_bench(tmp_path: Path) -> AsyncIterator[StartBench]:
    """`await start_bench(plays=..., spec sections=...)`: a bench with its route open."""
    async with AsyncExitStack() as stack:

        async def start(*plays: Any, route: bool = True, template: str | None = None, **spec: Any) -> Bench:
            write_toy_model(tmp_path / "model", **({"template": template} if template else {}))
            engine = await stack.enter_async_context(ScriptedEngine(plays, vocab_size=259))
            proxy = await stack.enter_async_context(ProxyServer(tmp_path))
            bench = Bench(tmp_path, proxy, engine, run_spec(tmp_path, **spec))
            stack.push_async_callback(bench.close)
            await proxy.control.create_run("demo", bench.spec, "digest")
            if route:
                await proxy.open_route(engine.url)
            return bench

        yield start


@pytest.fixture
def add_tool() -> dict[str, Any]:
    return ADD_TOOL


@pytest.fixture
def spec_for() -> Callable[..., dict[str, Any]]:
    """`spec_for(folder, section=changes)`: a run file for the toy model in `folder`."""
    return run_spec
