#!/usr/bin/env bash
# Makes the environment of the peers, $1, from their lock file; torch and the like it reads from the project's, $2.
set -euo pipefail
home=${1:?usage: install.sh FOLDER PROJECT_VENV} project=${2:?usage: install.sh FOLDER PROJECT_VENV}
lock=$(dirname "$0")/peers.lock
if [ -f "$home/.ready" ] && [ "$home/.ready" -nt "$lock" ]; then exit; fi
rm -rf "$home"
"$project/bin/python" -m venv "$home"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
realpath "$(packages "$project")" >"$(packages "$home")/project.pth"
"$home/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r "$lock"
touch "$home/.ready"
