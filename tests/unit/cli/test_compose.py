"""docker-compose.yml: valid by the compose schema, and the same set of processes as `seamlessflow up`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.servers import DYNAMIC_CONFIG, services
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workflows.spec import NodeSpec

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "docker-compose.yml"
ONE_SHOT = {"temporal-schema", "s3-fsync", "join"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    data = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(data, dict)
    return data


def test_it_is_valid_by_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_every_process_of_a_local_cluster(compose: dict[str, Any], tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.write(
        ClusterConfig(
            temporal="127.0.0.1:1",
            temporal_ui="http://127.0.0.1:2",
            proxy="http://127.0.0.1:3",
            s3="127.0.0.1:4",
            ledger_url="sqlite://",
            journal_url="sqlite://",
        ),
        Secrets(control_key="c", s3_access_key="a", s3_secret_key="s"),
    )
    nodes = tuple(NodeSpec(id=name, tags=frozenset({"rollout"})) for name in ("n0", "n1"))
    assert {service.name for service in services(state, nodes)} <= set(compose["services"])


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_is_written_into_it(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"KEY|PWD|PASSWORD", key):
                assert value.startswith("${"), f"{name}: {key}"


def test_what_serves_is_restarted_and_images_are_pinned(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["restart"] == ("on-failure:5" if name in ONE_SHOT else "unless-stopped"), name
        if "build" not in service:
            assert re.search(r":\d", service["image"]), service["image"]


def test_dependencies_have_the_health_check_they_are_waited_for(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for other, rule in service.get("depends_on", {}).items():
            if rule["condition"] == "service_healthy":
                assert "healthcheck" in compose["services"][other], f"{name} waits for {other}"
            else:
                assert other in ONE_SHOT, f"{name} waits for the end of {other}"


def test_build_targets_exist_in_the_dockerfile(compose: dict[str, Any]) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE))
    wanted = {service["build"]["target"] for service in compose["services"].values() if "build" in service}
    assert wanted == targets - {"base"}
    for file in re.findall(r"^COPY (requirements/.*) requirements/$", dockerfile, re.MULTILINE):
        for name in file.split():
            assert (ROOT / name).is_file(), name


def test_temporal_gets_the_same_dynamic_configuration_as_the_local_server() -> None:
    config = yaml.safe_load((ROOT / "docker" / "temporal-dynamic-config.yaml").read_text())
    assert {key: str(values[0]["value"]).lower() for key, values in config.items()} == DYNAMIC_CONFIG


def test_keys_are_fresh_each_time(tmp_path: Path) -> None:
    first, second = (
        subprocess.run([ROOT / "docker" / "make-env"], capture_output=True, text=True, check=True) for _ in "ab"
    )
    keys = [dict(line.split("=") for line in run.stdout.splitlines() if "KEY=" in line) for run in (first, second)]
    assert keys[0].keys() == {"SEAMLESSFLOW_CONTROL_KEY", "SEAMLESSFLOW_S3_ACCESS_KEY", "SEAMLESSFLOW_S3_SECRET_KEY"}
    assert set(keys[0].values()).isdisjoint(keys[1].values())
