/*
 * What the fuzzers of formats with one file share: the input as such a file. If it opens, it must be consistent: chunks
 * within shapes, extents within the file.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

#include "fuzz.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void fuzz_check_extents(const fc_checkpoint *c, const fc_tensor *t, size_t file_size) {
    fc_error err;
    for (size_t i = 0; i < t->nchunks && !(t->object && t->object->refusal); i++) {
        const fc_chunk *chunk = &t->chunks[i];
        fc_extent e;
        fc_box box = fc_chunk_box(t, chunk);
        if (!fc_box_within(&box, t->shape) || fc_checkpoint_extent(c, t, i, &e, &err) != FC_OK) {
            abort();
        }
        if (e.codec == FC_CODEC_RAW && (e.offset > file_size || e.length > file_size - e.offset ||
                                        e.length != (uint64_t)fc_box_volume(&box) * fc_dtype_size(t->dtype))) {
            abort();
        }
    }
    if (t->object && !t->object->refusal) {
        fc_arena *arena = fc_arena_new();
        const char *json;
        if (fc_checkpoint_object_json(c, t, arena, &json, &err) != FC_OK) {
            abort();
        }
        fc_arena_free(arena);
    }
}

/* Opens the input as a checkpoint. @param extension of the file's name */
static inline void fuzz_open_file(const uint8_t *data, size_t size, const char *extension) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        char name[32];
        snprintf(name, sizeof name, "fuzz-XXXXXX%s", extension);
        fuzz_place(path, name);
        fd = mkstemps(path, (int)strlen(extension));
        if (fd < 0) {
            abort();
        }
        fuzz_remove_at_end(path);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) {
        abort();
    }
    fc_checkpoint *c;
    fc_error err;
    if (fc_checkpoint_open(path, NULL, &c, &err) == FC_OK) {
        for (size_t i = 0; i < c->ntensors; i++) {
            fuzz_check_extents(c, &c->tensors[i], size);
        }
        fc_checkpoint_close(c);
    } else if (strncmp(err.message, path, strlen(path)) != 0) {
        abort(); /* every message must start with the file */
    }
}
