"""Command line and environment of a real SGLang server, from the run file. Imports nothing of SGLang."""

from __future__ import annotations

import re
from pathlib import Path

from storage.errors import EngineProtocolError
from workers.engines.launch import Launch, Place, on_cuda
from workers.engines.sglang_checks import RESERVED, check_release
from workflows.spec import EngineSpec, RunSpec

SHIMS = Path(__file__).parent / "shims" / "sglang_cpu"
"""Stand-ins for what has no CPU build: see its README."""
ENVIRONMENT = {
    "SGLANG_FORCE_STREAM_INTERVAL": "1",  # an abort gives back every token, not the last multiple of fifty
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would make a token, which it cannot while paused
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by RESERVED; the adapter lets no request get there
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def problem(engine: EngineSpec, interpreter: Path) -> str | None:
    """Why the server cannot be started as the run file says; None if nothing is known against it."""
    try:
        check_release(installed_release(interpreter))
    except EngineProtocolError as error:
        return str(error)
    if on_cuda(engine.device):
        if engine.transfer == "collective" and engine.data_parallel > 1:
            return "SGLang takes no broadcast with data_parallel above 1: set transfer: disk"
        return None
    if engine.deterministic:
        return "SGLang has no deterministic mode on the CPU: it needs the attention kernels of a CUDA device"
    if engine.tensor_parallel > 1 or engine.data_parallel > 1:
        return "on the CPU SGLang runs as one rank here: set tensor_parallel and data_parallel to 1"
    if engine.memory_fraction is not None:
        return "memory_fraction does nothing on the CPU: kv_tokens says how much the cache holds"
    return None


def installed_release(interpreter: Path) -> str:
    """The version of the package ``sglang`` beside an interpreter; empty if there is none."""
    found = interpreter.parent.parent.glob("lib/python*/site-packages/sglang-*.dist-info")
    names = (re.fullmatch(r"sglang-(.+)\.dist-info", path.name) for path in found)
    return next((name[1] for name in names if name), "")


def launch(spec: RunSpec, place: Place, interpreter: str) -> Launch:
    """The server on a node. Its weights are version 0."""
    engine = spec.engine
    flags: dict[str, object] = {
        "--model-path": spec.model.path,
        "--host": place.host,
        "--port": place.port,
        "--weight-version": 0,
        "--dtype": spec.model.dtype,
        "--context-length": spec.model.max_context + RESERVED,
        "--max-running-requests": engine.max_running,
        "--random-seed": spec.seed,
        "--tp-size": engine.tensor_parallel,
        "--dp-size": engine.data_parallel,
    }
    switches = ["--incremental-streaming-output"]
    if engine.sync_mode == "in_place":
        # With overlap one sampled token is still unread when the pause begins, and would count for the new weights.
        switches.append("--disable-overlap-schedule")
    if engine.lora_rank:
        switches.append("--enable-lora")
        flags |= {"--max-lora-rank": engine.lora_rank, "--lora-target-modules": "all"}
    environment = dict(ENVIRONMENT)
    if on_cuda(engine.device):
        switches += ["--enable-memory-saver"]
        if engine.memory_fraction is not None:
            flags["--mem-fraction-static"] = engine.memory_fraction
        if engine.deterministic:
            switches.append("--enable-deterministic-inference")
    else:
        flags |= {"--device": "cpu", "--attention-backend": "torch_native"}
        flags["--max-total-tokens"] = engine.kv_tokens + RESERVED
        switches += ["--disable-cuda-graph", "--sleep-on-idle"]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIMS)}
    words = [word for name, value in flags.items() for word in (name, str(value))]
    return Launch((interpreter, "-m", "sglang.launch_server", *words, *switches), environment)
