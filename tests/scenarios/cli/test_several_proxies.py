"""A local cluster with three proxies over a PostgreSQL server."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from postgres import PostgresServer

from cli import stack
from cli.processes import signal_group
from proxy.client import ControlClient
from storage.errors import ConfigError
from workers.cluster import StateFolder
from workflows.spec import NodeSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NODES = (NodeSpec(id="n0", tags=frozenset({"rollout", "train"})),)
PROXIES = ["proxy", "proxy-2", "proxy-3"]


@pytest.fixture
def state(tmp_path) -> Iterator[StateFolder]:
    folder = StateFolder(tmp_path)
    try:
        yield folder
    finally:
        stack.down(folder)


def test_several_proxies_need_a_server_before_anything_starts(tmp_path) -> None:
    folder = StateFolder(tmp_path / "new")
    with pytest.raises(ConfigError, match="cannot share SQLite files"):
        stack.up(folder, NODES, proxies=3, say=lambda line: None)
    assert not folder.root.exists()


async def test_each_of_three_proxies_serves_the_same_cluster(state: StateFolder, postgres: PostgresServer) -> None:
    database = postgres.database()
    try:
        status = stack.up(state, NODES, proxies=3, database=database, say=lambda line: None)
        assert [name for name, row in status.services.items() if name.startswith("proxy")] == PROXIES
        assert all(status.services[name].state == "ready" for name in PROXIES)
        with pytest.raises(ConfigError, match="runs with 3 proxies"):
            stack.up(state, NODES, proxies=2, say=lambda line: None)
        urls, key = state.cluster().proxy_urls, state.secrets().control_key
        route = {"run": "r", "node": "n", "url": "http://127.0.0.1:9", "epoch": 1, "version": 0}
        async with ControlClient(urls[0], key) as first:
            await first.put_route("lease", **route, state="held")
        for url in urls:
            async with ControlClient(url, key) as client:
                assert [row["state"] for row in await client.routes()] == ["held"]
        record = status.services["proxy"].process
        assert record is not None
        signal_group(record, signal.SIGKILL)
        async with ControlClient(urls, key) as any_of_them:
            assert len(await any_of_them.routes()) == 1
        assert stack.up(state, None, say=lambda line: None).services.keys() == status.services.keys()
        stack.down(state)
    finally:
        postgres.drop(database)
