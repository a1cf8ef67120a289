#!/bin/sh
# The command, as it is installed, has the protections of cmake/hardening.cmake: readelf shows them.
# Usage: hardening.sh FSDPCKPT
set -u
command -v readelf >/dev/null || { echo "skipped: no readelf"; exit 77; }
status=0

# has WHAT TEXT PATTERN: TEXT has a line that matches PATTERN.
has() {
    printf '%s\n' "$2" | grep -Eq "$3" || { echo "missing: $1"; status=1; }
}

header=$(LC_ALL=C readelf -hW "$1") || exit 1
segments=$(LC_ALL=C readelf -lW "$1")
dynamic=$(LC_ALL=C readelf -dW "$1")
symbols=$(LC_ALL=C readelf -W --dyn-syms "$1")
has "position-independent executable" "$header" 'Type: +DYN'
has "position-independent executable" "$dynamic" 'FLAGS_1.*PIE'
has "RELRO" "$segments" 'GNU_RELRO'
has "immediate binding, without which RELRO is partial" "$dynamic" 'FLAGS.*NOW'
has "stack protector" "$symbols" '__stack_chk_fail'
has "_FORTIFY_SOURCE" "$symbols" '__(memcpy|snprintf|vsnprintf)_chk'
has "a stack that is not executable" "$segments" 'GNU_STACK .* RW +0x'
printf '%s\n' "$dynamic" | grep -Eq 'TEXTREL' && { echo "relocations in the program text"; status=1; }
exit $status
