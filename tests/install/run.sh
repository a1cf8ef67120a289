#!/bin/sh
# Installs the build into a new directory and builds and runs programs against it, found by CMake and by pkg-config: the one of
# docs/C.md as that page says, whose output must be the one that it shows, and one that uses the training step.
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
sed -i "s|^prefix=.*|prefix=$work/prefix|" "$PKG_CONFIG_PATH"/fsdpckpt*.pc

# The only block of a kind on the page.
block() {
    sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" "$here/../../docs/C.md" | sed '1d;$d'
}

build_with_cmake() {
    cmake -S "$1" -B "$2" -DCMAKE_PREFIX_PATH="$work/prefix" -DPROGRAM="$work/page/list.c" >"$work/log" 2>&1 &&
        cmake --build "$2" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}

mkdir "$work/page"
cd "$work/page"
block c >list.c
block cmake >CMakeLists.txt
block text >expected
cp -r "$here/../corpus/good/dcp-torch2.15.0-uneven" ckpt
build_with_cmake . "$work/by_cmake"
build_with_cmake "$here" "$work/build"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir fsdpckpt)
export LD_LIBRARY_PATH
# The page's own line. The second eval removes the quotes that pkg-config puts around paths with spaces.
line=$(block sh | head -1)
eval "eval \"$line\""
./list ckpt/ vec full.h5 saved.h5 >by_hand
"$work/prefix/bin/fsdpckpt" diff --data ckpt/ full.h5
"$work/prefix/bin/fsdpckpt" verify saved.h5
"$work/by_cmake/list" ckpt/ vec full2.h5 saved2.h5 >by_cmake
"$work/build/by_pkgconfig" ckpt/ vec full3.h5 saved3.h5 >by_pkgconfig
for output in by_hand by_cmake by_pkgconfig; do
    diff expected "$output"
done
pkg-config --static --libs fsdpckpt >/dev/null
"$here/headers.sh" "$work/prefix/include"
if [ -e "$PKG_CONFIG_PATH/fsdpckpt-train.pc" ]; then # FSDPCKPT_WITH_TRAIN
    "$work/build/train_by_cmake" >/dev/null
    "$work/build/train_by_pkgconfig" >/dev/null
fi
"$work/prefix/bin/fsdpckpt" --version >/dev/null
# Packages may compress the pages, and have a place of their own for zsh.
for file in fsdpckpt.1 fsdpckpt-reshard.1 fsdpckpt.fish bash-completion/completions/fsdpckpt _fsdpckpt; do
    test -n "$(find "$work/prefix/share" -size +0 -path "*/$file*")"
done
# Modules are found relative to the command's present directory, not to its configured prefix.
if [ -n "$(find "$work/prefix" -name libfsdpckpt-comm-mpi.so)" ] && command -v mpirun >/dev/null; then
    FSDPCKPT_MODULE_PATH= "$work/prefix/bin/fsdpckpt" consolidate "$checkpoint" -o "$work/x.h5" --dry-run -q --comm mpi
fi
code=0
./list nowhere vec never.h5 never2.h5 2>message || code=$?
test "$code" = 3 || { echo "a missing checkpoint: status $code" >&2; exit 1; }
grep -q '^nowhere: ' message
