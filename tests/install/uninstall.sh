#!/bin/sh
# Installs and uninstalls: nothing that the installation made is left, and nothing of others is removed.
# Usage: uninstall.sh BUILD_DIR
set -eu
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

quietly() {
    "$@" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }
}

# Others have a file, an empty directory, and later a page where fsdpckpt has pages.
prefix="$work/a prefix"
mkdir -p "$prefix/bin" "$prefix/share/fish"
touch "$prefix/bin/other"
quietly cmake --install "$build" --prefix "$prefix"
"$prefix/bin/fsdpckpt" --version >/dev/null
touch "$prefix/share/man/man1/other.1"
rm "$prefix/share/man/man1/fsdpckpt.1"
quietly cmake --build "$build" --target uninstall
(cd "$prefix" && find . | sort) >"$work/left"
printf '%s\n' . ./bin ./bin/other ./share ./share/fish ./share/man ./share/man/man1 ./share/man/man1/other.1 |
    diff - "$work/left"

# With DESTDIR; nothing was there before.
export DESTDIR="$work/root"
quietly cmake --install "$build" --prefix /usr
test -x "$DESTDIR/usr/bin/fsdpckpt"
quietly cmake --build "$build" --target uninstall
test ! -e "$DESTDIR"

# The list of files is gone.
if cmake --build "$build" --target uninstall >"$work/log" 2>&1; then
    echo "it was uninstalled twice" >&2
    exit 1
fi
grep -q 'install_manifest.txt does' "$work/log"
