"""The `seamlessflow` command line: what it says when it is used wrongly, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli import demo as demo_module
from cli import reach, stack
from cli.demo import Clock, DemoOptions, build_if_missing
from cli.shards import list_shards
from storage.errors import ConfigError, DeadlineError
from storage.ports import free_port
from workers.cluster import STATE_VARIABLE, ClusterConfig, Secrets, StateFolder
from workflows.spec import NodeSpec


def seamlessflow(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != STATE_VARIABLE}
    command = [sys.executable, "-c", "from cli.main import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["down"],
        ["logs"],
        ["pause", "toy"],
        ["audit", "toy"],
        ["node", "drain", "n0"],
        ["shards", "list", "toy"],
    ],
)
def test_without_a_cluster_it_says_how_to_start_one(command: list[str], tmp_path: Path) -> None:
    done = seamlessflow(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no cluster: start one with `seamlessflow up run.yaml`" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_written_cannot_be_read_while_the_cluster_is_down_and_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path)
    where = {"temporal": "x", "proxy": "x", "s3": f"127.0.0.1:{free_port()}", "journal_url": "sqlite://"}
    secrets = Secrets(control_key="k", s3_access_key="a", s3_secret_key="s")
    folder.write(ClusterConfig(ledger_url=f"sqlite:///{tmp_path}/ledger.db", **where), secrets)
    monkeypatch.setattr(reach, "ASK_S", 0.2)
    with pytest.raises(DeadlineError, match=f"runs here: start it with `seamlessflow up --state {tmp_path}`"):
        list_shards(folder, "toy")
    with stack.locked(folder, stack.LOCK), pytest.raises(DeadlineError, match="list runs/toy/") as seen:
        list_shards(folder, "toy")
    assert "seamlessflow up" not in str(seen.value), "it runs, and has another trouble"


def test_it_names_the_clusters_that_are_there(tmp_path: Path) -> None:
    (tmp_path / ".seamlessflow" / "demo").mkdir(parents=True)
    (tmp_path / ".seamlessflow" / "demo" / "cluster.json").write_text("{}")
    assert "there is: --state .seamlessflow/demo" in seamlessflow("status", cwd=tmp_path).stderr


def test_a_wrong_run_file_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: toy\nstepps: 3\n")
    for command in (["up", "run.yaml"], ["demo", "run.yaml"]):
        done = seamlessflow(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "run.yaml:2: stepps: unknown key" in done.stderr
        assert not list(tmp_path.glob(".seamlessflow/*/services.json"))


@pytest.mark.parametrize("port", ["ui", "ui=x", "ui=0", "ui=70000"])
def test_a_port_that_is_no_port_is_refused(port: str, tmp_path: Path) -> None:
    done = seamlessflow("up", "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert "not of the form name=number" in done.stderr


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ({"web": 8080}, "port 'web' is not known: use one of temporal, ui, proxy, s3"),
        ({"ui": 8233, "proxy": 8233}, "port 8233 for ui is given twice"),
    ],
)
def test_ports_that_cannot_be_are_refused_before_a_folder_is_made(
    ports: dict[str, int], message: str, tmp_path: Path
) -> None:
    nodes = (NodeSpec(id="n0", tags=frozenset({"rollout", "train"})),)
    with pytest.raises(ConfigError, match=message):
        stack.up(StateFolder(tmp_path / "state"), nodes, ports=ports)
    assert not (tmp_path / "state").exists()


def test_up_without_a_run_file_in_a_new_folder_says_what_is_missing(tmp_path: Path) -> None:
    done = seamlessflow("up", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no nodes yet: name a run file" in done.stderr
    assert not (tmp_path / ".seamlessflow").exists()


def test_the_clock_goes_on_after_an_interruption(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    (tmp_path / demo_module.CLOCK_FILE).write_text(json.dumps({"seconds": 100.0}))
    clock = Clock(state)
    assert 100.0 <= clock.seconds() < 200.0
    clock.save()
    assert Clock(state).seconds() >= 100.0


def options(tmp_path: Path, module: str) -> DemoOptions:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "run: toy\nmodel: {path: made/model}\ndata: {path: made/tasks.jsonl}\nreward: {target: 'json:loads'}\n"
        "nodes: [{id: n0, tags: [rollout, train]}]\n"
    )
    return DemoOptions(run_file, StateFolder(tmp_path / "state"), (module,))


def test_a_model_whose_making_fails_leaves_no_half_of_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended with exit code"):
        build_if_missing(options(tmp_path, "no_such_module"), lambda line: None)
    assert not (tmp_path / "made").exists()


def test_a_folder_that_is_there_but_incomplete_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match=r"remove .*made, it will be made anew"):
        build_if_missing(options(tmp_path, "json"), lambda line: None)
    assert (tmp_path / "made").is_dir()
