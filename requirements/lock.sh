#!/usr/bin/env bash
# Writes the lock files anew from pyproject.toml: dev first, the other roles as subsets of it.
#
# torch stands alone in torch.lock, without hashes: its CPU and CUDA builds share a version, and which of them is
# wanted is the machine's choice. What torch itself needs comes with the other files. Needs pip-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
compile=${LOCK_TOOL:-pip-compile}

write() { # lock file, what it is made from in words, options and input of pip-compile
    local output=$1 source=$2
    shift 2
    # Versions stay as they are unless asked for anew, as in: requirements/lock.sh --upgrade
    [ ! -f "$output" ] || cp "$output" "$output.new"
    "$compile" --quiet --generate-hashes --strip-extras --no-emit-options --no-emit-index-url \
        --no-emit-find-links --no-emit-trusted-host --no-header --output-file "$output.new" "$@"
    {
        echo "# Made by requirements/lock.sh from $source. Install with: pip install --no-deps --require-hashes"
        # The tail names what is left out.
        sed -e '/^# The following packages/,$d' -e '/^# WARNING/,$d' "$output.new"
    } >"$output"
    rm "$output.new"
}

lock() { # role, further options
    local role=$1
    shift
    # torch is installed from torch.lock.
    write "requirements/$role.lock" "pyproject.toml, extra '$role'" --extra "$role" --allow-unsafe \
        --unsafe-package torch --unsafe-package seamlessflow "$@" pyproject.toml
}

lock_client() { # name, further options
    local name=$1 omit=()
    shift
    # mini-swe-agent reads benchmarks with these (200 MB); its agent, models and environments do without.
    for package in datasets dill multiprocess numpy pandas pyarrow; do omit+=(--unsafe-package "$package"); done
    write "requirements/clients/$name.lock" "$name.in" "${omit[@]}" "$@" "requirements/clients/$name.in"
}

lock_vllm() { # further options
    local omit=()
    for package in torch torchvision torchaudio torchcodec; do omit+=(--unsafe-package "$package"); done
    write requirements/engines/vllm.lock vllm.in --allow-unsafe "${omit[@]}" "$@" requirements/engines/vllm.in
}

lock_sglang() { # further options
    local omit=() alone=() hashes
    for package in torch triton setuptools; do omit+=(--unsafe-package "$package"); done
    write requirements/engines/sglang.lock sglang.in --allow-unsafe --constraint requirements/torch.lock "${omit[@]}" "$@" \
        requirements/engines/sglang.in
    # These two, without their dependencies, have a build for each Python.
    for package in sglang==0.5.23 torchvision==0.28.0; do
        hashes=$(mktemp -d)
        for version in 3.11 3.12 3.13; do
            "${PYTHON:-.venv/bin/python}" -m pip --quiet download --no-deps --only-binary=:all: \
                --python-version "$version" --dest "$hashes" "$package"
        done
        mapfile -t alone < <(cd "$hashes" && sha256sum ./*.whl | cut -d' ' -f1 | sort)
        {
            printf '%s' "$package"
            printf ' \\\n    --hash=sha256:%s' "${alone[@]}"
            printf '\n    # alone, see sglang.in\n'
        } >>requirements/engines/sglang.lock
        rm -r "$hashes"
    done
}

case ${1:-} in
clients) shift ;; # only the clients of the contract tests, each for itself
vllm | sglang) # only the environment of that server
    engine=$1
    shift
    "lock_$engine" "$@"
    exit
    ;;
*)
    lock_vllm "$@"
    lock_sglang "$@"
    lock dev "$@"
    for role in proxy control trainer agents simulator local; do
        lock "$role" --constraint requirements/dev.lock "$@"
    done
    ;;
esac
for input in requirements/clients/*.in; do
    lock_client "$(basename "$input" .in)" "$@"
done
