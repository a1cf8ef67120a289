#!/bin/sh
# Installs the build into a new directory and builds and runs a consumer against it, found by CMake and by pkg-config.
# Usage: run.sh BUILD_DIR|INSTALLED_PREFIX CHECKPOINT
set -eu
build=$1
checkpoint=$2
here=$(cd "$(dirname "$0")" && pwd)
# pkgconf escapes each byte that is not ASCII, which CMake does not undo.
if [ -n "$(printf '%s' "${TMPDIR:-}" | LC_ALL=C tr -d ' -~')" ]; then
    export TMPDIR=/tmp
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -x "$build/bin/fsdpckpt" ]; then
    cp -a "$build" "$work/prefix"
else
    cmake --install "$build" --prefix "$work/prefix" >"$work/log" || { cat "$work/log"; exit 1; }
fi
# The .pc file has the prefix of configure time, so pkg-config must be told about --prefix.
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name fsdpckpt.pc)")
export PKG_CONFIG_PATH
sed -i "s|^prefix=.*|prefix=$work/prefix|" "$PKG_CONFIG_PATH/fsdpckpt.pc" "$PKG_CONFIG_PATH/fsdpckpt-train.pc"
cmake -S "$here" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake --build "$work/build" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
a=$("$work/build/by_cmake" "$checkpoint")
b=$("$work/build/by_pkgconfig" "$checkpoint")
LD_LIBRARY_PATH=$(pkg-config --variable=libdir fsdpckpt)
export LD_LIBRARY_PATH
# As in a Makefile, without and with --static. eval removes the quotes of pkg-config.
eval "cc \"\$here/consumer.c\" -o \"\$work/by_hand\" $(pkg-config --cflags --libs fsdpckpt)"
c=$("$work/by_hand" "$checkpoint")
pkg-config --static --libs fsdpckpt >/dev/null
test "$a" -gt 0 && test "$a" = "$b" && test "$a" = "$c"
"$work/build/train_by_cmake" >/dev/null
"$work/build/train_by_pkgconfig" >/dev/null
"$work/prefix/bin/fsdpckpt" --version >/dev/null
# Packages may compress the pages, and have a place of their own for zsh.
for file in fsdpckpt.1 fsdpckpt-reshard.1 fsdpckpt.fish bash-completion/completions/fsdpckpt _fsdpckpt; do
    test -n "$(find "$work/prefix/share" -size +0 -path "*/$file*")"
done
# Modules are found relative to the command's present directory, not to its configured prefix.
if [ -n "$(find "$work/prefix" -name libfsdpckpt-comm-mpi.so)" ] && command -v mpirun >/dev/null; then
    FSDPCKPT_MODULE_PATH= "$work/prefix/bin/fsdpckpt" consolidate "$checkpoint" -o "$work/x.h5" --dry-run -q --comm mpi
fi
if "$work/build/by_cmake" /nonexistent 2>/dev/null; then
    echo "a missing checkpoint was opened" >&2
    exit 1
fi
