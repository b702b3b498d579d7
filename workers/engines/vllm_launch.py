"""Command line and environment of a real vLLM server, from the run file. Imports nothing of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from storage.errors import ConfigError
from workers.engines.checkpoint import read_json
from workers.engines.launch import Launch, Place, on_cuda
from workflows.spec import EngineSpec, ModelSpec, RunSpec

OLDEST = (0, 32, 0)
"""The first release whose calls are those that the adapter makes."""
EXTENSION = Path(__file__).parent / "vllm_extension"
"""What is put into the server's workers: see its README."""
ENVIRONMENT = {
    "PYTHONPATH": str(EXTENSION),
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, abort, weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension reports log-probs through the sampler of the first
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than its clients keep a connection: who closes first can lose a call
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
TOP_LOGPROBS = 20
BLOCK = 128
"""Tokens of a block of the KV cache on the CPU."""
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""That attention on the CPU can do; others end the server at the first request."""
BYTES = {"float32": 4, "bfloat16": 2}


def problem(engine: EngineSpec, interpreter: Path) -> str | None:
    """Why the server cannot be started as the run file says; None if nothing is known against it."""
    release = installed_release(interpreter)
    if (numbers := re.match(r"(\d+)\.(\d+)\.(\d+)", release)) is None:
        return f"no vLLM is installed beside {interpreter}"
    if tuple(map(int, numbers.groups())) < OLDEST:
        return f"vLLM {release} is too old: {'.'.join(map(str, OLDEST))} or later is needed, run make engine-vllm"
    if engine.data_parallel > 1:
        return "weights are changed in one replica at a time: set data_parallel to 1 and give each replica a node"
    if on_cuda(engine.device):
        return None
    if engine.deterministic:
        return "vLLM has no batch-invariant kernels on the CPU"
    if engine.memory_fraction is not None:
        return "memory_fraction does nothing on the CPU: kv_tokens says how much the cache holds"
    return None


def installed_release(interpreter: Path) -> str:
    """The version of vLLM beside an interpreter, whose CPU build has a name of its own; empty if there is none."""
    found = interpreter.parent.parent.glob("lib/python*/site-packages/vllm*.dist-info")
    names = (re.fullmatch(r"vllm(?:_cpu)?-(.+)\.dist-info", path.name) for path in found)
    return next((name[1] for name in names if name), "")


def launch(spec: RunSpec, place: Place, interpreter: str) -> Launch:
    """The server on a node.

    Raises:
        ConfigError: the calls that change weights would be open to the network, or the model has an attention that
            vLLM cannot do here.
    """
    if place.host not in LOOPBACK:
        raise ConfigError(
            f"vLLM must not listen on {place.host}: it asks nobody who pauses it or changes its weights. Let the node "
            "agent and the proxy run on its machine, as 127.0.0.1"
        )
    engine = spec.engine
    flags: dict[str, object] = {
        "--model": spec.model.path,
        "--served-model-name": "policy",
        "--host": place.host,
        "--port": place.port,
        "--dtype": spec.model.dtype,
        "--max-model-len": spec.model.max_context,
        "--max-num-seqs": engine.max_running,
        "--seed": spec.seed,
        "--load-format": "safetensors",
        "--tensor-parallel-size": engine.tensor_parallel,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": TOP_LOGPROBS + 1,
        "--worker-extension-cls": "seamlessflow_vllm.WorkerExtension",
    }
    switches = ["--enable-scale-out", "--enable-server-load-tracking", "--disable-uvicorn-access-log"]
    environment = dict(ENVIRONMENT)
    if engine.lora_rank:
        switches.append("--enable-lora")
        flags["--max-lora-rank"] = engine.lora_rank
    if on_cuda(engine.device):
        switches.append("--enable-sleep-mode")
        if engine.memory_fraction is not None:
            flags["--gpu-memory-utilization"] = engine.memory_fraction
        if engine.deterministic:
            environment["VLLM_BATCH_INVARIANT"] = "1"
    else:
        # A prompt that is read in parts ends the server if it has a seed: a generator of the CPU cannot be set back.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        flags["--max-num-batched-tokens"] = max(2048, spec.model.max_context) + engine.max_running
        flags["--kv-cache-memory-bytes"] = kv_bytes(spec.model, engine)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # whoever starts it pins it
    words = [word for name, value in flags.items() for word in (name, str(value))]
    return Launch((interpreter, "-m", "vllm.entrypoints.launchers.api_server.entry", *words, *switches), environment)


def kv_bytes(model: ModelSpec, engine: EngineSpec) -> int:
    """Memory of ``kv_tokens`` tokens, in whole blocks and one request of full length at least."""
    config = read_json(Path(model.path) / "config.json")
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    if size not in HEAD_SIZES:
        sizes = ", ".join(map(str, sorted(HEAD_SIZES)))
        raise ConfigError(f"{model.path} has heads of {size}: on the CPU vLLM can do {sizes}")
    kv_heads, layers = config.get("num_key_value_heads", heads), config["num_hidden_layers"]
    tokens = max(engine.kv_tokens, model.max_context + BLOCK)
    return int(-(-tokens // BLOCK) * BLOCK * 2 * layers * kv_heads * size * BYTES[model.dtype])
