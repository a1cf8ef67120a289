/*
 * Paths of values in a nested state dict, and of files: see path.h.
 */
#include "checkpoint/path.h"

#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "net/remote.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
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

const char *fc_path_spell(fc_arena *arena, const fc_path *path, char separator) {
    size_t size = 1, at = 0;
    for (size_t i = 0; i < path->count; i++) {
        size += strlen(path->elements[i].key) + 1;
    }
    char *name = fc_arena_alloc(arena, size);
    for (size_t i = 0; name && i < path->count; i++) {
        const size_t len = strlen(path->elements[i].key);
        if (i > 0) {
            name[at++] = separator;
        }
        memcpy(name + at, path->elements[i].key, len);
        at += len;
    }
    if (name) {
        name[at] = '\0';
    }
    return name;
}

bool fc_path_copy(fc_arena *arena, const fc_path *path, fc_path *out) {
    fc_path_element *elements = fc_arena_calloc(arena, path->count, sizeof *elements);
    for (size_t i = 0; elements && i < path->count; i++) {
        elements[i] = path->elements[i];
        elements[i].key = fc_arena_strndup(arena, elements[i].key, strlen(elements[i].key));
        elements = elements[i].key ? elements : NULL;
    }
    *out = (fc_path){elements, path->count};
    return elements != NULL;
}

bool fc_path_add_suffix(fc_arena *arena, const char *suffix, const char **name, fc_path *path) {
    fc_path_element *elements = fc_arena_copy(arena, path->elements, path->count, sizeof *elements);
    *name = fc_arena_printf(arena, "%s%s", *name, suffix);
    if (!elements || !*name) {
        return false;
    }
    fc_path_element *last = &elements[path->count - 1];
    *last = (fc_path_element){.key = fc_arena_printf(arena, "%s%s", last->key, suffix)};
    path->elements = elements;
    return last->key != NULL;
}

bool fc_file_in(fc_arena *arena, const char *directory, const char *name, fc_file *out) {
    out->name = fc_arena_strndup(arena, name, strlen(name));
    out->path = fc_arena_printf(arena, "%s%s%s", directory, fc_ends_with(directory, "/") ? "" : "/", name);
    return out->name && out->path;
}

fc_code fc_check_links(const char *directory, const fc_file *files, size_t count, fc_error *err) {
    if (fc_is_remote(directory)) {
        return FC_OK; /* there are no links */
    }
    char root[PATH_MAX];
    if (!fc_realpath(directory, root)) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", directory);
    }
    for (size_t i = 0; i < count; i++) {
        FC_TRY(fc_check_link(files[i].path, files[i].name, root, err));
    }
    return FC_OK;
}
