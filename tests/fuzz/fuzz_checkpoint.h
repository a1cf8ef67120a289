/*
 * What the fuzzers of checkpoints on disk share: what must hold for each tensor of one that opens.
 */
#pragma once

#include "fsdpckpt/move.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FUZZ_MOST_BYTES = 1 << 14 };

static inline void fuzz_check_chunk(const fc_checkpoint *c, const fc_tensor *t, size_t index) {
    const fc_box box = fc_chunk_box(t, &t->chunks[index]);
    struct stat st;
    fc_extent e;
    fc_error err;
    if (!fc_box_within(&box, t->shape) || fc_box_volume(&box) <= 0) {
        abort();
    }
    if (fc_checkpoint_extent(c, t, index, &e, &err) != FC_OK || e.codec != FC_CODEC_RAW) {
        return;
    }
    uint64_t last = e.first + fc_dtype_size(t->dtype) - 1;
    for (int d = 0; d < t->ndim; d++) {
        last += (uint64_t)(box.sizes[d] - 1) * (uint64_t)e.strides[d] * fc_dtype_size(t->dtype);
    }
    if (e.file >= c->nfiles || last >= e.length || stat(c->files[e.file].path, &st) != 0 ||
        e.offset > (uint64_t)st.st_size || e.length > (uint64_t)st.st_size - e.offset) {
        abort();
    }
}

/* Checks all chunks, and reads the value if it is small. Reading may fail with a message. */
static inline void fuzz_check_tensor(const fc_checkpoint *c, const fc_tensor *t) {
    static const int64_t origin[FC_MAX_DIMS];
    static unsigned char bytes[FUZZ_MOST_BYTES];
    const fc_box whole = {t->ndim, origin, t->shape};
    int64_t elements;
    fc_error err;
    if (!t->name || t->ndim < 0 || t->ndim > FC_MAX_DIMS || !fc_numel(t->ndim, t->shape, &elements)) {
        abort();
    }
    for (size_t i = 0; i < t->nchunks && !t->object; i++) {
        fuzz_check_chunk(c, t, i);
    }
    if (t->object) {
        fc_arena *arena = fc_arena_new();
        const char *json;
        (void)fc_checkpoint_object_json(c, t, arena, &json, &err);
        fc_arena_free(arena);
    } else if ((uint64_t)elements <= FUZZ_MOST_BYTES / fc_dtype_size(t->dtype)) {
        (void)fc_read_box(c, t, &whole, t->dtype, bytes, &err);
    }
}

/* Opens the checkpoint at `path` and checks it, or its error, whose message must begin with the path. */
static inline void fuzz_open(const char *path) {
    fc_checkpoint *c;
    fc_error err;
    if (fc_checkpoint_open(path, NULL, &c, &err) != FC_OK) {
        if (strncmp(err.message, path, strlen(path)) != 0) {
            abort();
        }
        return;
    }
    for (size_t i = 0; i < c->ntensors; i++) {
        fuzz_check_tensor(c, &c->tensors[i]);
    }
    fc_checkpoint_close(c);
}
