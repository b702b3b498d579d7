"""The local object store as a process: restarts, signals, ports, keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from storage.errors import ConfigError
from storage.objects import ObjectStore
from storage.seaweed import HOST, Ports, Weed, configure_fsync, weed_command
from workers.cluster import ClusterConfig, Secrets, StateFolder

KEYS = ("access", "a-secret-of-some-length")


def test_ports_are_different_and_free() -> None:
    ports = Ports.free()
    assert len(set(vars(ports).values())) == len(vars(ports))
    assert ports.taken() == []
    assert ports.admin_grpc == ports.admin + 10_000


def test_the_command_line_is_loopback_only_and_holds_no_key(tmp_path: Path) -> None:
    command = weed_command(tmp_path, Ports.free())
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"} <= set(command)
    assert not any("key" in part or "secret" in part for part in command)


def test_without_keys_nothing_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="open to everybody"):
        Weed(tmp_path, "access", "")


def test_a_port_that_is_in_use_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            Weed(tmp_path, *KEYS, s3_port=port)
    assert not (tmp_path / "weed.json").exists()


def test_objects_survive_a_kill_and_the_server_comes_back_on_its_ports(tmp_path: Path) -> None:
    folder = tmp_path / ("deep-" * 30)  # a path that is too long for a socket
    first = Weed(folder, *KEYS, log=tmp_path / "weed.log")
    first.wait_ready("bucket")
    configure_fsync(first.ports)
    store = first.store("bucket")
    digest = store.put("key", b"acknowledged")
    first.process.kill()
    first.process.wait()
    with Weed(folder, *KEYS, s3_port=first.ports.s3, log=tmp_path / "weed.log") as second:
        assert second.ports == first.ports
        # No wait for readiness: the store's own retries carry a client over a restart.
        assert store.get("key", sha256=digest) == b"acknowledged"
        store.put("key2", b"more")
    store.close()


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder(tmp_path / "state")
    config = ClusterConfig(
        temporal="127.0.0.1:1",
        proxy="http://127.0.0.1:1",
        s3=f"{HOST}:{Ports.free().s3}",
        ledger_url="sqlite:///ledger.db",
        journal_url="sqlite:///journal.db",
    )
    state.write(config, Secrets(control_key="control", s3_access_key=KEYS[0], s3_secret_key=KEYS[1]))
    return state


def serve(state: StateFolder) -> subprocess.Popen[bytes]:
    with (state.root / "s3.log").open("ab") as log:
        command = [sys.executable, "-m", "storage.seaweed", "--state", str(state.root)]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def server_of(state: StateFolder) -> psutil.Process:
    return psutil.Process(json.loads((state.root / "s3" / "weed.json").read_text())["pid"])


def test_the_service_stops_with_sigterm_and_takes_over_from_a_killed_one(state: StateFolder) -> None:
    first = serve(state)
    store = ObjectStore.from_state(state)
    store.ensure_bucket()
    digest = store.put("key", b"acknowledged")
    orphan = server_of(state)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert orphan.is_running()

    second = serve(state)
    try:
        assert psutil.wait_procs([orphan], timeout=60)[0] == [orphan]
        assert store.get("key", sha256=digest) == b"acknowledged"
        server = server_of(state)
    finally:
        second.terminate()
        code = second.wait(60)
    store.close()
    assert code == 0
    assert not server.is_running()
    assert not (state.root / "s3" / "weed.json").exists()


def test_a_service_without_a_cluster_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "storage.seaweed", "--state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("seamlessflow up")) == (1, 1)
