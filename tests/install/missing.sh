#!/bin/sh
# Configures where libraries are missing: one error names the packages of all that are needed, one message those of all that
# are optional. Usage: missing.sh SOURCE_DIR
set -eu
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PKG_CONFIG_PATH

# expect TEXT: the output of CMake has it, whatever its lines.
expect() {
    tr -s ' \n' '  ' <"$work/log" | grep -qF -- "$1" || { cat "$work/log"; echo "it does not say: $1" >&2; exit 1; }
}

# configure OPTION...: the exit status is that of CMake.
configure() {
    rm -rf "$work/build"
    cmake -S "$source" -B "$work/build" -DFSDPCKPT_WITH_CUDA=OFF -DFSDPCKPT_WITH_PYTHON=OFF "$@" >"$work/log" 2>&1
}

if PKG_CONFIG_LIBDIR=$work configure -DFSDPCKPT_TESTS=ON -DFSDPCKPT_WITH_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON \
    -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON; then
    echo "it could be configured without libraries" >&2
    exit 1
fi
expect "sudo apt-get install zlib1g-dev libhdf5-dev libjansson-dev libxxhash-dev libcmocka-dev libopenmpi-dev then"
expect "needed: ZLIB, hdf5-serial, jansson, libxxhash, cmocka, MPI."

# All files of pkg-config but those of the optional libraries.
mkdir "$work/pc"
for directory in $(pkg-config --variable pc_path pkg-config | tr : ' '); do
    find "$directory" -name '*.pc' ! -name libseccomp.pc ! -name libisal.pc ! -name libzstd.pc ! -name libcurl.pc -exec ln -sf -t "$work/pc" {} + 2>/dev/null || true
done
PKG_CONFIG_LIBDIR=$work/pc configure -DFSDPCKPT_TESTS=OFF -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON \
    -DCMAKE_DISABLE_FIND_PACKAGE_BZip2=ON || { cat "$work/log"; exit 1; }
expect "FSDPCKPT_WITH_SECCOMP: the sandbox of the process that reads HDF5 files"
expect "FSDPCKPT_WITH_ISAL: fast gzip"
expect "FSDPCKPT_WITH_ZSTD: checkpoints that are compressed"
expect "FSDPCKPT_WITH_BZIP2: HDF5 files that are compressed with bzip2"
expect "FSDPCKPT_WITH_CURL: checkpoints on servers"
expect "FSDPCKPT_WITH_MPI: mpirun and srun"
expect "sudo apt-get install libseccomp-dev libisal-dev libzstd-dev libbz2-dev libcurl4-openssl-dev libopenmpi-dev"

# What is not wanted is not missed.
PKG_CONFIG_LIBDIR=$work/pc configure -DFSDPCKPT_TESTS=OFF -DFSDPCKPT_WITH_MPI=OFF -DFSDPCKPT_WITH_ISAL=OFF \
    -DFSDPCKPT_WITH_SECCOMP=OFF -DFSDPCKPT_WITH_ZSTD=OFF -DFSDPCKPT_WITH_BZIP2=OFF -DFSDPCKPT_WITH_CURL=OFF -DCMAKE_DISABLE_FIND_PACKAGE_BZip2=ON || { cat "$work/log"; exit 1; }
! grep -E 'Optional libraries|apt-get' "$work/log"
