# Sourced by scripts/demo and scripts/test: what they need, installed where it is missing, quietly where it is not.
# Leaves the repository's root as the working directory and sets PYTHON to a Python with torch and h5py, or to "".
# shellcheck shell=bash disable=SC2034

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONDONTWRITEBYTECODE=1

say() {
    printf '== %s\n' "$*"
}

# Debian packages; a person without root is told the line to type.
setup_packages() {
    local missing=() package
    if ! command -v dpkg-query >/dev/null; then
        say "not a Debian system: assuming that the packages of the README are installed"
        return
    fi
    for package in "$@"; do
        # shellcheck disable=SC2016
        if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            missing+=("$package")
        fi
    done
    if [ ${#missing[@]} -eq 0 ]; then
        return
    fi
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        root=(sudo)
        if ! sudo -n true 2>/dev/null; then
            echo "These packages are missing, and this is neither root nor a user of sudo without a password. Run:" >&2
            echo "    sudo apt-get install ${missing[*]}" >&2
            exit 1
        fi
    fi
    say "installing ${missing[*]} (a minute or two)"
    quietly "${root[@]}" apt-get update -qq
    quietly "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

has_modules() {
    "$1" -c 'import torch, numpy, h5py, safetensors, ml_dtypes' >/dev/null 2>&1
}

# Real PyTorch and h5py, from $FSDPCKPT_PYTHON, else from .venv, which is made once. FSDPCKPT_NO_TORCH=1 does without.
# pip goes its usual ways: PIP_EXTRA_INDEX_URL and the like work.
setup_python() {
    PYTHON=
    if [ -n "${FSDPCKPT_PYTHON:-}" ]; then
        has_modules "$FSDPCKPT_PYTHON" || { echo "FSDPCKPT_PYTHON=$FSDPCKPT_PYTHON lacks torch, numpy, h5py, safetensors or ml_dtypes" >&2; exit 1; }
        PYTHON=$FSDPCKPT_PYTHON
    elif [ -x .venv/bin/python ] && has_modules .venv/bin/python; then
        PYTHON=$PWD/.venv/bin/python
    elif [ -z "${FSDPCKPT_NO_TORCH:-}" ]; then
        say "installing PyTorch and h5py into .venv (once; 5 GB, some minutes)"
        say "  FSDPCKPT_PYTHON=FILE uses a Python that has them, FSDPCKPT_NO_TORCH=1 does without"
        if quietly python3 -m venv .venv && quietly .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            torch numpy h5py safetensors ml_dtypes jsonschema && has_modules .venv/bin/python; then
            PYTHON=$PWD/.venv/bin/python
        else
            say "pip could not install them: going on without PyTorch"
        fi
    fi
}

BUILD_PACKAGES="build-essential cmake git libhdf5-dev libisal-dev libjansson-dev libseccomp-dev libxxhash-dev ninja-build
    pkg-config python3 python3-venv zlib1g-dev libcmocka-dev hdf5-tools libopenmpi-dev openmpi-bin"
TEST_PACKAGES="clang clang-format clang-tidy libclang-rt-14-dev"

# Runs a command quietly; its output appears only when it fails.
quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        echo "failed: $*" >&2
        return 1
    fi
    rm -f "$log"
}
