"""`seamlessflow check`: all that is wrong with a run file, at once, with the line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import memory, targets
from cli.check import check_run, require_run
from cli.main import app
from cli.runfile import RunFileError, load_run

GOOD = """\
run: toy
model:
  path: model
data:
  path: tasks.jsonl
  held_out: held.jsonl
agent:
  kind: python
  target: my_agent:run
reward:
  target: my_agent:score
nodes:
  - {id: n0, tags: [rollout, train]}
  - {id: n1, tags: [rollout]}
pipeline:
  steps: 3
"""


def write_model(folder: Path, *, architecture: str = "Qwen3ForCausalLM", rows: int = 4) -> None:
    folder.mkdir()
    config = {"architectures": [architecture], "max_position_embeddings": 4096, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, 2], "data_offsets": [0, 8 * rows]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": "1+2"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "2+2"}\n')
    (tmp_path / "my_agent.py").write_text(
        "raise SystemExit('was run')\nasync def run(task, llm): ...\ndef score(r): ...\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def problems(run_file: Path) -> Callable[[str, str], list[tuple[int | None, str, str]]]:
    """Problems after one replacement in the good file: (line, field, message)."""

    def ask(old: str, new: str) -> list[tuple[int | None, str, str]]:
        assert old in GOOD
        run_file.write_text(GOOD.replace(old, new))
        return [(problem.line, problem.where, problem.message) for problem in check_run(run_file).problems]

    return ask


Ask = Callable[[str, str], list[tuple[int | None, str, str]]]


def test_a_good_run_file_passes_without_running_user_code(run_file: Path) -> None:
    assert check_run(run_file).problems == ()


def test_relative_paths_are_relative_to_the_run_file(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    spec = load_run(run_file)
    folder = run_file.parent.resolve()
    assert spec.model.path == str(folder / "model")
    assert spec.data.path == str(folder / "tasks.jsonl")
    assert spec.data.held_out == str(folder / "held.jsonl")
    assert spec.code == str(folder)


def test_everything_wrong_is_told_at_once(run_file: Path) -> None:
    run_file.write_text(
        GOOD.replace("path: model", "path: nowhere")
        .replace("steps: 3", "stepps: 3")
        .replace("my_agent:score", "my_agent:scor")
        .replace("tags: [rollout]", "tags: [rollout], cores: [4096]")
        .replace("path: tasks.jsonl", "path: none.jsonl")
    )
    found = {(problem.line, problem.where) for problem in check_run(run_file).problems}
    assert found == {
        (3, "model.path"),
        (5, "data.path"),
        (11, "reward.target"),
        (14, "nodes[1].cores"),
        (16, "pipeline.stepps"),
    }


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "hint"),
    [
        ("pipeline:", "pipline:", 15, "pipline", "did you mean 'pipeline'?"),
        ("steps: 3", "step: 3", 16, "pipeline.step", "did you mean 'steps'?"),
        ("{id: n0, tags", "{name: n0, tags", 13, "nodes[0].id", "is missing"),
        ("  path: model\n", "  path: model\n  zzz: 1\n", 4, "model.zzz", "known here: dtype"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(
    problems: Ask, old: str, new: str, line: int, where: str, hint: str
) -> None:
    assert any((at, field) == (line, where) and hint in text for at, field, text in problems(old, new))


@pytest.mark.parametrize(
    ("old", "new", "line", "part"),
    [
        ("steps: 3", "steps: [3", 17, "not valid YAML"),
        ("steps: 3", "steps: 3\n  steps: 4", 17, "stands twice; first in line 16"),
        ("steps: 3", "steps: 0", 16, "greater than or equal to 1 (it is 0)"),
        ("tags: [rollout, train]", "tags: [rollout]", None, "no node has the tag 'train'"),
        ("id: n1", "id: n0", None, "id 'n0' is used twice"),
        ("kind: python", "kind: pyton", 8, "'single_turn', 'python' or 'command'"),
        ("my_agent:run", "my_agent.run", 9, "not of the form package.module:function"),
        ("my_agent:run", "my_agent:walk", 9, "defines no 'walk'"),
        ("my_agent:run", "no_such_agent:run", 9, "neither installed nor below"),
        (
            "  kind: python\n  target: my_agent:run",
            "  kind: command\n  target: no-such-program -x",
            9,
            "neither on PATH",
        ),
        ("steps: 3", "steps: 3\nengine: {python: /no/such/python}", 17, "no program that can be run"),
        ("steps: 3", "steps: 3\nsampling:\n  temperature: 0", 18, "0 is greedy"),
        ("path: model", "path: model\n  max_context: 100000", 4, "more than the model's 4096 positions"),
        ("path: model", "path: model\n  tool_open: <call>", 2, "do nothing with tool_parser 'auto'"),
        ("kind: python", "kind: single_turn", 7, "target does nothing with kind 'single_turn'"),
        ("kind: python", "kind: command\n  options: {depth: 2}", 7, "only a Python agent takes them"),
        ("steps: 3", "steps: 3\nalgorithm: {advantage: 'my_agent:gain'}", 17, "defines no 'gain'"),
        ("steps: 3", "steps: 3\nalgorithm: {kl: k3, kl_coefficient: 1, reference: old}", 17, "holds no config.json"),
        ("steps: 3", "steps: 3\nalgorithm: {clip_low: 0.1}", 17, "clip_low does nothing here"),
        ("steps: 3", "steps: 3\nalgorithm: {token_staleness: 1}", None, "no token that is more than 1 updates old"),
        ("tags: [rollout]", "tags: [rollout, critic]", None, "'n1' has the tag 'critic' without 'train'"),
        ("steps: 3", "steps: 3\n  name: off_policy\npool: {nodes: any}", None, "take the tag 'rollout' from n0"),
        ("  held_out: held.jsonl", "evaluation: {every: 2}", None, "needs held-out tasks"),
    ],
)
def test_each_mistake_is_told_with_its_line(problems: Ask, old: str, new: str, line: int | None, part: str) -> None:
    found = problems(old, new)
    assert any(at == line and part in text for at, _, text in found), found


def test_a_file_that_is_no_mapping_or_not_there_is_told(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    with pytest.raises(RunFileError, match="must be a YAML mapping"):
        load_run(empty)
    with pytest.raises(RunFileError, match="cannot be read: No such file"):
        require_run(tmp_path / "none.yaml")


def test_a_broken_line_of_the_data_is_named(run_file: Path) -> None:
    (run_file.parent / "tasks.jsonl").write_text('{"prompt": 1}\n{"prompt": \n[1]\n')
    messages = [problem.message for problem in check_run(run_file).problems]
    assert [message.split(": ")[0].rpartition("/")[2] for message in messages] == ["tasks.jsonl:2", "tasks.jsonl:3"]


def test_another_engine_may_stand_in_for_that_of_the_run_file_and_is_checked_like_it(run_file: Path) -> None:
    assert require_run(run_file, engine="scripted").engine.kind == "scripted"
    problems = check_run(run_file, engine="imagined").problems
    assert [problem.where for problem in problems] == ["engine.kind"]


def test_another_number_of_steps_may_stand_in_for_that_of_the_run_file_and_is_checked_like_it(run_file: Path) -> None:
    assert require_run(run_file, steps=7).pipeline.steps == 7
    (problem,) = check_run(run_file, steps=0).problems
    assert "steps" in problem.where


def test_a_model_the_engine_cannot_run_is_refused(tmp_path: Path, run_file: Path) -> None:
    write_model(tmp_path / "bert", architecture="BertForMaskedLM")
    run_file.write_text(GOOD.replace("path: model", "path: bert"))
    (problem,) = check_run(run_file).problems
    assert "architecture BertForMaskedLM is not supported" in problem.message


def test_a_model_without_its_tokenizer_is_refused(run_file: Path) -> None:
    (run_file.parent / "model" / "tokenizer.json").unlink()
    (problem,) = check_run(run_file).problems
    assert "lacks tokenizer.json" in problem.message


def test_a_run_that_cannot_fit_into_memory_is_refused(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 1 << 30)
    (problem,) = check_run(run_file).problems
    assert "this machine has 1.0 GiB" in problem.message


def test_critic_and_reference_take_memory_too(run_file: Path) -> None:
    parameters = 1 << 30
    plain, node = load_run(run_file), load_run(run_file).nodes[0]
    run_file.write_text(GOOD + "algorithm: {name: ppo, kl: k3, kl_coefficient: 0.1}\n")
    more = memory.node_bytes(load_run(run_file), node, parameters) - memory.node_bytes(plain, node, parameters)
    assert more == parameters * (16 + 4)  # float32: the critic's weights, gradients and two moments; the reference


def test_a_model_that_is_not_there_yet_is_the_only_problem(run_file: Path) -> None:
    run_file.write_text(GOOD.replace("path: model", "path: later"))
    (problem,) = check_run(run_file).problems
    assert problem.where == "model.path"


def test_parameters_are_counted_from_the_headers(run_file: Path) -> None:
    assert memory.count_parameters(run_file.parent / "model") == 8


@pytest.mark.parametrize("target", ["json:loads", "storage.errors:ConfigError", "xml.dom.minidom:parse"])
def test_targets_that_are_installed_are_found(target: str, tmp_path: Path) -> None:
    assert targets.problem(target, tmp_path) is None


def test_the_command_prints_every_problem_and_ends_with_2(run_file: Path) -> None:
    run_file.write_text(GOOD.replace("steps: 3", "stepps: 3"))
    result = CliRunner().invoke(app, ["check", str(run_file)])
    assert result.exit_code == 2
    assert f"{run_file}:16: pipeline.stepps: unknown key; did you mean 'steps'?" in result.output
