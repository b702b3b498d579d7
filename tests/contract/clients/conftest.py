"""One proxy with one session for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from client_rig import CONTEXT, Rig

from proxy.testing import ProxyServer, write_toy_model


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    write_toy_model(tmp_path / "model")
    spec = {
        "run": "demo",
        "model": {"path": str(tmp_path / "model"), "max_context": CONTEXT, "tool_parser": "hermes"},
        "data": {"path": "tasks.jsonl"},
        "reward": {"target": "rewards:exact"},
        "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        "pipeline": {"hold_limit_s": 30.0},
    }
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(ProxyServer(tmp_path))
        await proxy.control.create_run("demo", spec, "digest")
        yield Rig(tmp_path, proxy, await proxy.control.create_session("demo"), stack)
