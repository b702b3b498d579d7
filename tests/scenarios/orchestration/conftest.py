"""A real Temporal server for the scenarios of the workflows, and a world of fake activities."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_world import FakeWorld
from temporalio.client import Client

from storage.ports import free_port
from workers.cluster import ClusterConfig
from workers.temporal import connect

FAST = {
    "frontend.WorkerCommandsEnabled": "true",
    "system.enableCancelActivityWorkerCommand": "true",
    "history.transferProcessorMaxPollRPS": "2000",
    "history.timerProcessorMaxPollRPS": "2000",
    "history.outboundProcessorMaxPollRPS": "2000",
    "history.visibilityProcessorMaxPollRPS": "200",
}
ATTRIBUTES = ("SfRun=Keyword", "SfStep=Int", "SfPhase=Keyword", "SfTags=KeywordList", "SfNode=Keyword")


@pytest.fixture(scope="session")
def temporal_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real development server that lives as long as the test session."""
    port = free_port()
    folder = tmp_path_factory.mktemp("temporal")
    command = [str(Path(sys.executable).parent / "temporal"), "server", "start-dev", "--headless"]
    command += ["--port", str(port), "--db-filename", str(folder / "temporal.db"), "--log-level", "error"]
    command += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=1"]
    for key, value in FAST.items():
        command += ["--dynamic-config-value", f"{key}={value}"]
    for attribute in ATTRIBUTES:
        command += ["--search-attribute", attribute]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=10)


@pytest.fixture
async def client(temporal_address: str) -> AsyncIterator[Client]:
    """A client; whatever a test leaves running is terminated after it."""
    cluster = ClusterConfig(
        temporal=temporal_address, proxy="http://unused", s3="unused", ledger_url="unused", journal_url="unused"
    )
    client = await connect(cluster, deadline_s=30)
    yield client
    async for left in client.list_workflows("ExecutionStatus = 'Running'"):
        await client.get_workflow_handle(left.id).terminate("the test is over")


@pytest.fixture
async def world(client: Client) -> AsyncIterator[FakeWorld]:
    """Two nodes, ``a`` {rollout, train} and ``b`` {rollout}, whose engines and ranks are fakes."""
    world = FakeWorld(client)
    async with world.running():
        yield world
    await asyncio.sleep(0)
