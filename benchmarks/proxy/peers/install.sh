#!/usr/bin/env bash
# Makes one virtual environment a peer under $1 from its lock file. One that cannot be installed is said so in the table.
set -uo pipefail
cd "$(dirname "$0")"
target=${1:?usage: install.sh FOLDER}
python=${PYTHON:-python3}
for lock in *.lock; do
    name=${lock%.lock}
    home="$target/$name"
    if [ -f "$home/.ready" ] && [ "$home/.ready" -nt "$lock" ]; then continue; fi
    rm -rf "$home"
    if "$python" -m venv "$home" &&
        "$home/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r "$lock"; then
        touch "$home/.ready"
    else
        echo "$name was not installed: see above" >&2
        rm -rf "$home"
    fi
done
