#!/usr/bin/env bash
# Makes .clients/<name>, an environment of its own for one client of the proxy, from its lock file: exact versions, checked hashes.
# Nothing of this project is in it: the client's tests give it an address and a key, as a user does.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: clients.sh NAME}
python=${PYTHON:-.venv/bin/python}
target=.clients/$name

rm -rf "$target"
"$python" -m venv --without-pip "$target"
# One pip serves them all. What a test imports is compiled by then; most of what is installed never is.
"$python" -m pip --python "$target/bin/python" --disable-pip-version-check install --quiet --no-compile \
    --no-deps --require-hashes -r "requirements/clients/$name.lock"
touch "$target/.ready"
