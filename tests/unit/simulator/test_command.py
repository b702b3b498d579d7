"""`seamlessflow simulate`: table, advice, pictures; the user's own policy by dotted path; mistakes told by name."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from cli.simulate import Options, simulate_run
from storage.errors import ConfigError
from workflows.spec import RunSpec

CLUSTER = {
    "nodes": [
        {"count": 2, "device": "H800", "tags": ["rollout", "train"]},
        {"count": 2, "device": "H20", "tags": ["rollout"]},
    ]
}
CONFIG = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
LOAD = {"prompt": 100, "answer": {"family": "lognormal", "median": 200, "sigma": 0.7, "cap": 2000}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(LOAD))
    run = {
        "run": "planned",
        "model": {"path": "model"},
        "data": {"path": "tasks.jsonl"},
        "reward": {"target": "rewards:any"},
        "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
        "algorithm": {"group_size": 4, "groups_per_step": 8},
        "pipeline": {"target_in_flight": 128},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path


def test_the_command_prints_table_advice_and_json_and_draws(folder: Path) -> None:
    files = [str(folder / "run.yaml"), "--cluster", str(folder / "cluster.yaml")]
    more = ["--workload", str(folder / "load.yaml"), "--pipeline", "off_policy", "--steps", "2"]
    answer = CliRunner().invoke(app, ["simulate", *files, *more, "--out", str(folder / "plan")])
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    assert lines[1].startswith("multiplexed as tagged")
    assert lines[2].startswith("off_policy")
    figures = json.loads(lines[-1])
    assert set(figures["pipelines"]) == {"multiplexed as tagged", "off_policy"}
    assert figures["advice"][0].startswith(("Use pipeline", "Keep what you have"))
    root = ElementTree.parse(folder / "plan" / "off_policy.svg").getroot()  # noqa: S314 - written a moment ago
    assert root.tag.endswith("svg")
    assert (folder / "plan" / "multiplexed-as-tagged.png").read_bytes().startswith(b"\x89PNG")


def test_a_users_policy_is_found_by_its_dotted_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own_policy.py").write_text(
        "from dataclasses import replace\n"
        "from workflows.scheduling.pipeline import policy\n"
        "def patient(spec, groups):\n"
        "    return replace(policy(spec, groups), name='patient', staleness=4)\n"
    )
    data = yaml.safe_load((folder / "run.yaml").read_text())
    data["pipeline"]["policy"] = "own_policy:patient"
    data["code"], data["model"]["path"] = str(folder), str(folder / "model")
    options = Options(folder / "cluster.yaml", str(folder / "load.yaml"), ("multiplexed",), 4, 0, None)
    found = simulate_run(RunSpec.model_validate(data), options, lambda line: None)["pipelines"]
    assert found["patient as tagged"]["staleness_mean"] > found["multiplexed"]["staleness_mean"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nodes": [{"count": 1, "device": "H900"}]}, "H900"),
        ({"nodes": [{"count": 1, "device": "H800"}], "costs": {"sinc_s": 1}}, "sinc_s"),
        ({}, "nodes"),
    ],
)
def test_a_wrong_cluster_file_is_told(folder: Path, change: dict[str, object], told: str) -> None:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(change))
    options = Options(folder / "cluster.yaml", "math-8k-thinking", ("multiplexed",), 1, 0, None)
    data = yaml.safe_load((folder / "run.yaml").read_text())
    with pytest.raises(ConfigError, match=told):
        simulate_run(RunSpec.model_validate(data), options, lambda line: None)
