/*
 * Parts of file names.
 */
#ifndef FSDPCKPT_CORE_FILE_NAME_H
#define FSDPCKPT_CORE_FILE_NAME_H

#include <stdbool.h>
#include <string.h>

/** What is behind the last slash of `path`; all of it where there is none. */
static inline const char *fc_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static inline bool fc_ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

#endif
