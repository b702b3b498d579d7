"""Harness of the scenarios: a real proxy and a scripted engine over HTTP, and the stock OpenAI client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.routes import EngineFactory
from proxy.testing import ProxyServer, write_toy_model
from storage.ledger import Route
from workers.engines.scripted import ScriptedEngine
from workers.engines.sglang import SglangEngine

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
        self.make_engine: EngineFactory | None = None
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

    async def route(self, state: str, version: int = 0, *, lease: str = "lease-a", engine: Any = None) -> None:
        """Put a route in force; a closed one returns when nothing runs on it any more."""
        url = (engine or self.engine).url
        node = {"node": f"node-{lease}", "engine_kind": "scripted", "epoch": 1}
        await self.proxy.control.put_route(lease, run="demo", **node, url=url, version=version, state=state)

    async def update_weights(self, version: int) -> None:
        """As the node agent does it where generations are cut: close, load, open."""
        await self.route("closed")
        self.engine.version = str(version)
        await self.route("open", version)

    async def restart(self) -> None:
        """The proxy's process ends in good order and another one begins on the same files."""
        before = self.proxy
        await before.__aexit__(None, None, None)
        self.proxy = ProxyServer(self.folder, before.store, self.make_engine)
        await self.proxy.__aenter__()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.proxy.__aexit__(None, None, None)


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


def _adapter(route: Route, *, stall_s: float) -> SglangEngine:
    return SglangEngine(route.url, stall_s=stall_s)


@pytest.fixture
def until() -> Any:
    return eventually


@pytest.fixture
async def start_bench(tmp_path: Path) -> AsyncIterator[StartBench]:
    """`await start_bench(*plays, section=changes)`: a bench with its route open.

    `template` and `merges` are of the toy model; `scripted` are arguments of the engine, an `engine_class`; `stall_s`
    is the longest silence of an engine that the proxy bears.
    """
    async with AsyncExitStack() as stack:

        async def start(
            *plays: Any,
            route: bool = True,
            template: str | None = None,
            merges: tuple[str, ...] = (),
            scripted: dict[str, Any] | None = None,
            engine_class: type[ScriptedEngine] = ScriptedEngine,
            stall_s: float = 600.0,
            **spec: Any,
        ) -> Bench:
            write_toy_model(tmp_path / "model", merges=merges, **({"template": template} if template else {}))
            options = {"vocab_size": 259 + 50 * len(merges), **(scripted or {})}
            engine = await stack.enter_async_context(engine_class(plays, **options))
            make_engine = partial(_adapter, stall_s=stall_s)
            proxy = await ProxyServer(tmp_path, make_engine=make_engine).__aenter__()
            bench = Bench(tmp_path, proxy, engine, run_spec(tmp_path, **spec))
            bench.make_engine = make_engine
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
