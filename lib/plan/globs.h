/*
 * Matches names against lists of globs, such as fc_selection.include.
 */
#pragma once

#include "fsdpckpt/select.h"

#include <fnmatch.h>
#include <stdbool.h>
#include <stddef.h>

/** @return whether one of the NULL-terminated `globs` (NULL means none) matches `name`; `*which` receives its index. */
static inline bool fc_globs_match(const char *const *globs, const char *name, size_t *which) {
    for (size_t i = 0; globs && globs[i]; i++) {
        if (fnmatch(globs[i], name, 0) == 0) {
            if (which) {
                *which = i;
            }
            return true;
        }
    }
    return false;
}

/** @return whether include and exclude of the selection leave `name` in. */
bool fc_selects(const fc_selection *selection, const char *name);

/**
 * Describes a glob that matches nothing, with the name or the glob that may be meant.
 * @param purpose "include" or "exclude".
 * @return a text in `arena`; NULL: out of memory.
 */
const char *fc_glob_misses(const fc_checkpoint *source, const char *glob, const char *purpose, fc_arena *arena);
