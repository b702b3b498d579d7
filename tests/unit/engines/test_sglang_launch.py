"""How an SGLang server is started, and what is refused before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, EngineProtocolError
from workers.engines import sglang_launch
from workers.engines.kinds import KINDS
from workers.engines.launch import Launch, Place
from workers.engines.sglang_checks import RESERVED, check_release
from workflows.spec import EngineSpec, RunSpec


def run(**engine: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "r",
            "seed": 3,
            "model": {"path": "/models/m", "dtype": "bfloat16", "max_context": 4096},
            "data": {"path": "t.jsonl"},
            "reward": {"target": "r:f"},
            "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
            "engine": {"kind": "sglang", **engine},
        }
    )


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that says it has SGLang 0.5.23."""
    (tmp_path / "lib/python3.11/site-packages/sglang-0.5.23.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    interpreter = tmp_path / "bin" / "python"
    interpreter.write_text("#!/bin/sh\n")
    interpreter.chmod(0o755)
    return interpreter


def launched(spec: RunSpec, python: Path) -> Launch:
    spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"python": str(python)})})
    return KINDS["sglang"].launch(spec, Place(spec.nodes[0], "127.0.0.1", 31000, Path("log")))


def flags(launch: Launch) -> dict[str, str]:
    words = launch.command[3:]
    return {
        word: "" if following.startswith("--") else following
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def test_on_the_cpu_the_shims_are_in_front_and_the_cache_has_the_size_asked_for(python: Path) -> None:
    launch = launched(run(device="cpu", kv_tokens=8192), python)
    given = flags(launch)
    assert launch.command[:3] == (str(python), "-m", "sglang.launch_server")
    assert launch.environment["PYTHONPATH"] == str(sglang_launch.SHIMS)
    assert (Path(launch.environment["PYTHONPATH"]) / "sitecustomize.py").is_file()
    assert launch.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.environment["SGLANG_FORCE_STREAM_INTERVAL"] == "1"
    assert (given["--device"], given["--attention-backend"]) == ("cpu", "torch_native")
    assert given["--max-total-tokens"] == str(8192 + RESERVED)
    assert given["--context-length"] == str(4096 + RESERVED)
    assert (given["--dtype"], given["--random-seed"], given["--weight-version"]) == ("bfloat16", "3", "0")
    assert "--incremental-streaming-output" in given


def test_on_cuda_no_shim_is_used_and_parallelism_memory_and_determinism_are_passed_on(python: Path) -> None:
    spec = run(device="cuda", tensor_parallel=4, data_parallel=2, memory_fraction=0.7, deterministic=True, lora_rank=16)
    launch = launched(spec, python)
    given = flags(launch)
    assert "PYTHONPATH" not in launch.environment
    assert "SGLANG_USE_CPU_ENGINE" not in launch.environment
    assert (given["--tp-size"], given["--dp-size"], given["--mem-fraction-static"]) == ("4", "2", "0.7")
    assert given["--max-lora-rank"] == "16"
    assert {"--enable-deterministic-inference", "--enable-memory-saver", "--enable-lora"} <= given.keys()
    assert "--device" not in given


@pytest.mark.parametrize(("mode", "off"), [("in_place", True), ("retract", False), ("abort", False)])
def test_overlap_is_off_where_it_would_put_a_token_under_the_wrong_version(python: Path, mode: str, off: bool) -> None:
    assert ("--disable-overlap-schedule" in launched(run(device="cpu", sync_mode=mode), python).command) == off


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"device": "cpu", "deterministic": True}, "deterministic"),
        ({"device": "cpu", "tensor_parallel": 2}, "tensor_parallel"),
        ({"device": "cpu", "data_parallel": 2}, "data_parallel"),
        ({"device": "cpu", "memory_fraction": 0.5}, "memory_fraction"),
        ({"device": "cuda", "data_parallel": 2, "transfer": "collective"}, "data_parallel"),
    ],
)
def test_what_the_server_cannot_do_there_is_refused_by_name(python: Path, engine: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        launched(run(**engine), python)


def test_an_environment_that_is_not_built_is_named_with_the_command_that_builds_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("workers.engines.kinds.ROOT", Path("/nowhere"))
    problem = KINDS["sglang"].problem(EngineSpec(kind="sglang"))
    assert problem is not None
    assert "make engine-sglang" in problem


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    problem = KINDS["sglang"].problem(EngineSpec(kind="sglang", python=str(tmp_path / "python")))
    assert problem == f"{tmp_path / 'python'} is no program that can be run"


def test_an_old_release_is_refused_before_it_is_started(python: Path) -> None:
    packages = python.parent.parent / "lib/python3.11/site-packages"
    (packages / "sglang-0.5.23.dist-info").rename(packages / "sglang-0.5.19.dist-info")
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.19 is too old: 0\.5\.21 or later"):
        launched(run(device="cpu"), python)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23.post1", "0.6.0", "1.0.0rc1"])
def test_a_release_that_is_new_enough_passes(version: str) -> None:
    check_release(version)


@pytest.mark.parametrize("version", ["0.5.19", "0.4.99", "", "unknown"])
def test_a_release_that_is_too_old_or_says_nothing_is_refused(version: str) -> None:
    with pytest.raises(EngineProtocolError, match="make engine-sglang"):
        check_release(version)


@pytest.mark.parametrize(
    "keys", [{"tensor_parallel": 2}, {"deterministic": True}, {"transfer": "collective"}, {"device": "cpu"}]
)
def test_keys_of_real_servers_are_refused_for_engines_of_ours(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(keys))} does nothing with kind 'embedded'"):
        EngineSpec(**keys)
