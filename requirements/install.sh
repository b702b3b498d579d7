#!/usr/bin/env bash
# Makes the virtual environment $1 from the lock files: exact versions, checked hashes, then this project, editable.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: install.sh VENV}
python=${PYTHON:-python3}

"$python" - <<'CHECK' || exit 2
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"Python {sys.version.split()[0]} is not supported: install 3.11, 3.12 or 3.13 and name it, as in PYTHON=python3.12")
CHECK

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# DeepSpeed compiles nothing: its CPU path needs none of its operators.
export DS_BUILD_OPS=0
pip install --quiet --no-deps -r requirements/torch.lock
pip install --quiet --no-deps --require-hashes -r requirements/dev.lock
pip install --quiet --no-deps --no-build-isolation --editable .
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
    echo "This build of torch needs NVIDIA's libraries: installing them too (several GB)." >&2
    echo "On a machine without a GPU, point pip to a CPU build of torch first: see CONTRIBUTING.md." >&2
    pip install --quiet -r requirements/torch.lock
fi
"$venv/bin/python" -c "import torch"
