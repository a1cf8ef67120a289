/*
 * Numbers for modules by patterns, as in rank_pattern and alpha_pattern of adapter_config.json. Most patterns are plain
 * names, which a table finds, so that the time is linear in the number of patterns and of modules.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>

/** A number for the modules that a pattern matches: as a whole, or their end after a dot. */
typedef struct fc_adapter_pattern {
    const char *text;  /**< as in the file */
    const char *regex; /**< POSIX extended; NULL: `text` has only letters, digits, "_", "-", and dots, which match any
                          character */
    double value;
} fc_adapter_pattern;

/** Returns whether a pattern needs no regular expression. */
bool fc_adapter_pattern_is_plain(const char *text);

/**
 * Sets values[i] to the number of the first pattern that matches modules[i], if one does.
 * @param path of the file with the patterns, for messages.
 * @return FC_EUNSUPPORTED if there are too many regular expressions for so many modules.
 */
fc_code fc_adapter_patterns_apply(const char *path, const fc_adapter_pattern *patterns, size_t count,
                                  const char *const *modules, size_t nmodules, double *values, fc_error *err);
