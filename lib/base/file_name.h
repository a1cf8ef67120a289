/*
 * Helpers for file names, and for taking names apart.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/** @return the part of `path` after its last slash, or all of it when it has none. */
static inline const char *fc_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static inline bool fc_ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/** Returns whether the file `path` is an index of files that end in `extension`: "model.safetensors.index.json", or
 * that of a variant, "model.safetensors.index.fp16.json". */
static inline bool fc_is_index_of(const char *path, const char *extension) {
    const char *at = strstr(fc_base_name(path), extension);
    return at && strstr(at, ".index.") && fc_ends_with(at, ".json");
}

/** Steps over `text` if it is at `*at`. @return whether it is. */
static inline bool fc_take_text(const char **at, const char *text) {
    const size_t n = strlen(text);
    const bool found = strncmp(*at, text, n) == 0;
    *at += found ? n : 0;
    return found;
}

/** Steps over decimal digits. @return their value; -1 if there are none, or if it is not below `limit` (at most 2^32).
 */
static inline int64_t fc_take_number(const char **at, int64_t limit) {
    int64_t value = **at >= '0' && **at <= '9' ? 0 : -1;
    for (; **at >= '0' && **at <= '9' && value < limit; ++*at) {
        value = value * 10 + (**at - '0');
    }
    return value < limit ? value : -1;
}
