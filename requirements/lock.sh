#!/usr/bin/env bash
# Writes the lock files anew from pyproject.toml: dev first, the other roles as subsets of it.
#
# torch stands alone in torch.lock, without hashes: its CPU and CUDA builds share a version, and which of them is
# wanted is the machine's choice. What torch itself needs comes with the other files. Needs pip-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
compile=${LOCK_TOOL:-pip-compile}

lock() { # role, further options
    local role=$1
    shift
    local output="requirements/$role.lock"
    # Versions stay as they are unless asked for anew, as in: requirements/lock.sh --upgrade
    [ ! -f "$output" ] || cp "$output" "$output.new"
    "$compile" --quiet --extra "$role" --generate-hashes --strip-extras --allow-unsafe \
        --unsafe-package torch --unsafe-package seamlessflow --no-emit-options --no-emit-index-url \
        --no-emit-find-links --no-emit-trusted-host --no-header "$@" --output-file "$output.new" pyproject.toml
    {
        echo "# Made by requirements/lock.sh from pyproject.toml, extra '$role'. Install with: pip install --no-deps --require-hashes"
        # The tail names torch, which is installed from torch.lock.
        sed -e '/^# The following packages/,$d' -e '/^# WARNING/,$d' "$output.new"
    } >"$output"
    rm "$output.new"
}

lock dev "$@"
for role in proxy control trainer agents local; do
    lock "$role" --constraint requirements/dev.lock "$@"
done
