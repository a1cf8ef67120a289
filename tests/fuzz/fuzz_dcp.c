/*
 * Fuzzes a whole DCP checkpoint with one data file. The input is the length of `.metadata` in four bytes, `.metadata`,
 * and __0_0.distcp. If it opens, it must be consistent: chunks within shapes, extents within files.
 */
#include "fsdpckpt/checkpoint.h"

#include "fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void put(const char *directory, const char *name, const uint8_t *data, size_t size) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) {
        abort();
    }
    close(fd);
}

/* Checks that the last byte that the strides reach is within the extent. */
static void check_extent(const fc_tensor *t, const fc_chunk *chunk, const fc_extent *e, size_t file_size) {
    uint64_t last = e->first + fc_dtype_size(t->dtype) - 1;
    for (int d = 0; d < t->ndim; d++) {
        last += (uint64_t)(chunk->dims[t->ndim + d] - 1) * (uint64_t)e->strides[d] * fc_dtype_size(t->dtype);
    }
    if (e->offset + e->length > file_size || (e->length > 0 && last >= e->length)) {
        abort();
    }
}

static void check_tensor(const fc_checkpoint *c, const fc_tensor *t, size_t file_size) {
    fc_error err;
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        fc_extent extent;
        for (int d = 0; d < t->ndim; d++) {
            if (chunk->dims[d] < 0 || chunk->dims[t->ndim + d] <= 0 ||
                chunk->dims[d] + chunk->dims[t->ndim + d] > t->shape[d]) {
                abort();
            }
        }
        if (fc_checkpoint_extent(c, t, i, &extent, &err) == FC_OK) {
            check_extent(t, chunk, &extent, file_size);
        }
    }
    if (t->object) {
        fc_arena *arena = fc_arena_new();
        const char *json;
        fc_checkpoint_object_json(c, t, arena, &json, &err);
        fc_arena_free(arena);
    }
}

static char directory[64];

/* Removes the files after the run. After a crash they stay for inspection. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int made;
    uint32_t n;
    if (!made) {
        fuzz_place(directory, "fuzz-dcp-XXXXXX");
        made = mkdtemp(directory) != NULL;
        fuzz_remove_at_end(directory);
    }
    if (size < 4) {
        return 0;
    }
    memcpy(&n, data, 4);
    n = n > size - 4 ? (uint32_t)(size - 4) : n;
    put(directory, ".metadata", data + 4, n);
    put(directory, "__0_0.distcp", data + 4 + n, size - 4 - n);
    fc_checkpoint *c;
    fc_error err;
    if (fc_checkpoint_open(directory, NULL, &c, &err) == FC_OK) {
        for (size_t i = 0; i < c->ntensors; i++) {
            check_tensor(c, &c->tensors[i], size - 4 - n);
        }
        fc_checkpoint_close(c);
    } else if (strncmp(err.message, directory, strlen(directory)) != 0) {
        abort(); /* every message must start with the file */
    }
    return 0;
}
