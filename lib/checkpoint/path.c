/*
 * Paths of values in a nested state dict.
 */
#include "fsdpckpt/checkpoint.h"

#include <string.h>

bool fc_path_spells(const fc_path *path, const char *name) {
    for (size_t i = 0; i < path->count; i++) {
        size_t len = strlen(path->elements[i].key);
        if ((i > 0 && *name++ != '.') || strncmp(name, path->elements[i].key, len) != 0) {
            return false;
        }
        name += len;
    }
    return *name == '\0';
}
