# Sourced by scripts/test. How far a stage is, from the log of ninja, ctest or clang-tidy.
# shellcheck shell=bash

clock() {
    printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# progress LOG: prints the last counter of ninja and tidy ("[12/345]") or of ctest ("12/345 Test #7: name"), and the tests that
# run now: ctest writes "Start 7: name" when a test begins and the counter when it ends.
progress() {
    LC_ALL=C awk '
        /^\[[0-9]+\/[0-9]+\]/ {
            split(substr($1, 2), n, /[^0-9]/)
            counter = n[1] " of " n[2]
        }
        /^ +Start +[0-9]+: / {
            begun[++count] = $2 + 0
            name[$2 + 0] = $3
        }
        /^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
            split($1, n, "/")
            counter = "test " n[1] " of " n[2]
            delete name[substr($3, 2) + 0]
        }
        END {
            for (i = 1; i <= count; i++) {
                if (begun[i] in name) {
                    running = running (running == "" ? "" : ", ") name[begun[i]]
                }
            }
            print counter (running == "" ? "" : (counter == "" ? "" : " ") "(running: " running ")")
        }' "$1"
}

# Prints the progress of a stage: every second on a terminal, in one line that is cut to its width, else every minute.
watch_log() {
    local log=$1 began=$SECONDS minutes=0 passed line size width
    while sleep 1 >/dev/null 2>&1; do
        passed=$((SECONDS - began))
        if [ -t 1 ]; then
            line="   $(clock $passed)  $(progress "$log")"
            { size=$(stty size <&3 2>/dev/null) || size=; } 3>&1
            width=${size#* }
            [ "${width:-0}" -gt 0 ] || width=80
            printf '\r\033[K%s' "${line:0:width-1}"
        elif [ $((passed / 60)) -gt "$minutes" ]; then
            minutes=$((passed / 60))
            printf '   %s  %s\n' "$(clock $passed)" "$(progress "$log")"
        fi
    done
}
