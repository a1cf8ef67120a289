#!/bin/sh
# Compiles every public header alone, as C11 and as C++11, and checks that fsdpckpt.h includes all of its folder, but not
# what only training needs: the folders below.
# Usage: headers.sh INCLUDE_DIR... (those of the sources, or the one that was installed)
set -eu
failed=0
flags=
for root; do
    flags="$flags -I$root"
done
compile() {
    # shellcheck disable=SC2086 # a list of options
    printf '#include <%s>\nint used;\n' "$1" | "$2" -x "$3" "-std=$4" $flags -fsyntax-only -pedantic -Wall -Wextra -Werror - ||
        { echo "$1 does not compile alone as $4" >&2; failed=1; }
}
count=0
for root; do
    for path in "$root"/fsdpckpt/*.h "$root"/fsdpckpt/*/*.h; do
        [ -e "$path" ] || continue
        name=${path#"$root"/}
        count=$((count + 1))
        compile "$name" cc c c11
        if command -v c++ >/dev/null; then
            compile "$name" c++ c++ c++11
        fi
        case $name in fsdpckpt/*/* | fsdpckpt/fsdpckpt.h) continue ;; esac
        grep -q "^#include \"$name\"$" "$root/fsdpckpt/fsdpckpt.h" ||
            { echo "fsdpckpt.h does not include $name" >&2; failed=1; }
    done
done
test "$count" -gt 40 || { echo "only $count headers in $*" >&2; failed=1; }
exit $failed
