#!/usr/bin/env bash
# Makes .engines/sglang, the environment of the SGLang server: on a machine without a GPU from its lock file (exact versions,
# checked hashes), with a driver for NVIDIA's devices as SGLang itself asks for it, kernels and torch for CUDA included.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
target=.engines/sglang

pip() { "$target/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

rm -rf "$target"
"$python" -m venv "$target"
if [ -e /dev/nvidiactl ]; then
    shims=
    pip sglang==0.5.23
else
    shims=workers/engines/shims/sglang_cpu
    pip --no-deps -r requirements/torch.lock
    "$target/bin/python" - <<'CHECK'
from importlib import metadata
import sys

torch = metadata.version("torch")
if not torch.endswith("+cpu"):
    sys.exit(f"SGLang on a CPU needs the CPU build of torch and pip found {torch}: see CONTRIBUTING.md on how to point pip to one")
CHECK
    pip --no-deps --require-hashes -r requirements/engines/sglang.lock
fi
PYTHONPATH=$shims SGLANG_USE_CPU_ENGINE=${shims:+1} "$target/bin/python" -W ignore -c "import sglang.srt.server_args"
touch "$target/.ready"
