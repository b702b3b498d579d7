"""A proxy and scripted engines in this process, a real client as a process of its own environment.

A client gets its address and key as any user gives them, by environment variables; what it does stands in
``tests/contract/clients/drivers``.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.client import RouteState
from proxy.testing import ProxyServer
from workers.engines.script import Play
from workers.engines.scripted import Output, ScriptedEngine
from workers.engines.sglang import SglangEngine

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = ROOT / "tests" / "contract" / "clients" / "drivers"
CONTEXT = 40_000
"""Tokens of the toy model are bytes, and some agents bring long instructions."""
_LIMIT_S = 100.0
"""For one client, on a machine that is busy."""


class Rig:
    """One proxy, one session, one client, and the engines that a test starts."""

    def __init__(self, folder: Path, proxy: ProxyServer, session: dict[str, Any], stack: AsyncExitStack) -> None:
        self.engines: list[ScriptedEngine] = []
        self._folder = folder
        self._proxy = proxy
        self._session = session
        self._stack = stack
        self._client: asyncio.subprocess.Process

    async def engine(self, *plays: Play, version: int = 0) -> ScriptedEngine:
        """One more engine, with its route open."""
        engine = ScriptedEngine(plays, vocab_size=259, max_context=CONTEXT, weight_version=str(version))
        self.engines.append(await self._stack.enter_async_context(engine))
        await self.route(engine, "open", version)
        return engine

    async def route(self, engine: ScriptedEngine, state: RouteState, version: int) -> None:
        """Set the state of the engine's route."""
        node = f"node-{self.engines.index(engine)}"
        await self._proxy.control.put_route(
            f"lease-{node}", run="demo", node=node, url=engine.url, epoch=1, version=version, state=state
        )

    async def update_weights(self, engine: ScriptedEngine, version: int) -> None:
        """As a node agent does it: nothing new starts, the engine changes between two tokens, work goes on."""
        await self.route(engine, "held", version - 1)
        adapter = SglangEngine(engine.url)
        try:
            await adapter.pause("in_place")
            await adapter.load_weights(f"/weights/{version}", version)
            await adapter.resume()
        finally:
            await adapter.close()
        await self.route(engine, "open", version)

    async def start(self, environment: str, driver: str, *arguments: str) -> None:
        """Start the client in an empty folder; skips the test if its environment is not built."""
        built = ROOT / ".clients" / environment
        if not (built / ".ready").is_file():
            pytest.skip(f"the environment of {environment} is not built: run `make clients`")
        home = self._folder / "home"
        home.mkdir()
        self._client = await asyncio.create_subprocess_exec(
            *(str(built / "bin" / "python"), str(DRIVERS / driver), *arguments),
            cwd=home,
            env={**self._address(), "PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._stack.push_async_callback(self._end)

    async def result(self) -> Any:
        """What the client printed last, as JSON."""
        async with asyncio.timeout(_LIMIT_S):
            out, err = await self._client.communicate()
        assert self._client.returncode == 0, err.decode()[-4000:]
        return json.loads(out.decode().splitlines()[-1])

    async def sent(self, engine: ScriptedEngine, request: int, tokens: int) -> None:
        """Wait until the engine has sent ``tokens`` tokens for its request number ``request``."""
        async with asyncio.timeout(_LIMIT_S):
            while len(engine.requests) <= request or len(self.output(engine, request).ids) < tokens:
                if self._client.returncode is not None:
                    pytest.fail(f"the client ended early: {(await self._client.communicate())[1].decode()[-4000:]}")
                await asyncio.sleep(0.005)

    def output(self, engine: ScriptedEngine, request: int) -> Output:
        return engine.outputs[engine.requests[request].rid]

    async def recorded(self) -> Any:
        """The session's state inside the proxy."""
        return (await self._proxy.service.sessions.get(self._session["session"])).session

    def _address(self) -> dict[str, str]:
        url, key = f"{self._proxy.url}/s/{self._session['session']}", self._session["api_key"]
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            # mini-swe-agent and litellm: one try, and no prices looked up on the internet.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    async def _end(self) -> None:
        if self._client.returncode is None:
            self._client.kill()
            await self._client.wait()
