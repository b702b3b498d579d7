"""The local cluster with every real server and process: it survives the kill of anything, and ends clean."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import stack
from cli.processes import signal_group, wait_gone
from storage.errors import ConfigError
from workers.cluster import StateFolder
from workers.residency import ProcessRef
from workflows.spec import NodeSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NODES = (
    NodeSpec(id="n0", tags=frozenset({"rollout", "train"})),
    NodeSpec(id="n1", tags=frozenset({"rollout"})),
)
SERVICES = {"temporal", "s3", "proxy", "control", "node-n0", "node-n1", "agents", "rewards"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateFolder]:
    """A state folder; the tests below go on with each other's cluster."""
    folder = StateFolder(tmp_path_factory.mktemp("cluster"))
    try:
        yield folder
    finally:
        stack.down(folder)


def start(state: StateFolder) -> stack.StackStatus:
    return stack.up(state, NODES, say=lambda line: None)


def processes(status: stack.StackStatus) -> dict[str, ProcessRef]:
    return {name: row.process for name, row in status.services.items() if row.process is not None}


def test_up_returns_when_every_service_is_ready(state: StateFolder) -> None:
    status = start(state)
    assert {name for name, row in status.services.items() if row.state == "ready"} == SERVICES
    assert stack.running(state)


def test_up_again_finds_the_cluster_running_and_changes_nothing(state: StateFolder) -> None:
    assert processes(start(state)) == processes(start(state))


def test_up_with_other_nodes_is_refused_while_it_runs(state: StateFolder) -> None:
    with pytest.raises(ConfigError, match="runs with other nodes"):
        stack.up(state, (NodeSpec(id="n2", tags=frozenset({"rollout"})),), say=lambda line: None)


def test_after_a_kill_of_the_whole_tree_up_starts_it_anew_with_the_same_addresses(state: StateFolder) -> None:
    before = start(state)
    addresses = state.cluster()
    everything = [before.supervisor, *processes(before).values()]
    for record in everything:
        signal_group(record, signal.SIGKILL)
    assert wait_gone(everything, 30)
    after = start(state)
    assert {name for name, row in after.services.items() if row.state == "ready"} == SERVICES
    assert set(processes(after).values()).isdisjoint(everything)
    assert state.cluster() == addresses


def test_services_that_outlived_a_killed_supervisor_are_ended_before_new_ones_start(state: StateFolder) -> None:
    before = start(state)
    signal_group(before.supervisor, signal.SIGKILL)
    assert wait_gone([before.supervisor], 30)
    orphans = processes(before)
    assert all(record.alive() for record in orphans.values())
    after = start(state)
    assert not any(record.alive() for record in orphans.values())
    assert processes(after).keys() == SERVICES


def test_down_leaves_no_process_and_keeps_the_state(state: StateFolder) -> None:
    status = start(state)
    everything = [status.supervisor, *processes(status).values()]
    assert stack.down(state) >= len(everything)
    assert not any(record.alive() for record in everything)
    assert not stack.running(state)
    for name in ("cluster.json", "secrets.json", "temporal.db", "ledger.db", "journal.db"):
        assert (state.root / name).is_file(), name
    assert stack.down(state) == 0


def test_a_service_that_cannot_start_leaves_nothing_running(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    (tmp_path / "temporal.db").mkdir()  # the server cannot open it
    with pytest.raises(stack.StackFailed, match="temporal ended 3 times before it was ready"):
        start(state)
    assert not stack.running(state)
    status = stack.StackStatus.read(state)
    assert status is not None
    assert processes(status) == {}
