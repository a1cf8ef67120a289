/*
 * Compares the values of two ranks' files: by the CRC-32s of the archives if these are enough, otherwise byte by byte.
 */
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/file/file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST = 64 << 20, /* the most bytes to read of tensors whose CRCs are not enough, because opening should only read
                        headers */
    BLOCK = 256 << 10
};

bool fc_torch_same_object(const torch_object *a, const torch_object *b) {
    bool same = !a->encoding == !b->encoding && a->size == b->size && a->nstorages == b->nstorages &&
                memcmp(a->pickle, b->pickle, a->size) == 0 && (!a->encoding || strcmp(a->encoding, b->encoding) == 0) &&
                !a->json == !b->json && (!a->json || strcmp(a->json, b->json) == 0);
    for (size_t i = 0; same && i < a->nstorages; i++) {
        same = a->storages[i].size == b->storages[i].size && a->storages[i].crc == b->storages[i].crc &&
               a->storages[i].crc != 0;
    }
    return same;
}

/* @return the bytes from the first to the last element, including gaps. Both tensors must have the same strides. */
static uint64_t span_of(const torch_extent *extent, int ndim, const int64_t *sizes, uint32_t element) {
    uint64_t last = 0;
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] == 0) {
            return 0;
        }
        last += (uint64_t)(sizes[i] - 1) * (uint64_t)extent->strides[i];
    }
    return (last + 1) * element;
}

/* Compares `span` bytes of two stored records. */
static fc_code compare_bytes(const fc_checkpoint *checkpoint, const torch_extent *a, const torch_extent *b,
                             uint64_t span, bool *same, fc_error *err) {
    const char *path_a = checkpoint->files[a->record.file].path, *path_b = checkpoint->files[b->record.file].path;
    unsigned char *x = malloc(2 * (size_t)BLOCK);
    int fd_a = -1, fd_b = -1;
    uint64_t size;
    fc_code rc;
    *same = false;
    FC_TRY_GOTO(x ? FC_OK : fc_no_memory(err, checkpoint->path), rc, out);
    FC_TRY_GOTO(fc_open_input(path_a, &fd_a, &size, err), rc, out);
    FC_TRY_GOTO(fc_open_input(path_b, &fd_b, &size, err), rc, out);
    bool equal = true;
    for (uint64_t at = 0; equal && at < span; at += BLOCK) {
        size_t n = span - at < BLOCK ? (size_t)(span - at) : BLOCK;
        FC_TRY_GOTO(fc_pread_full(fd_a, x, n, a->record.offset + a->first + at, path_a, err), rc, out);
        FC_TRY_GOTO(fc_pread_full(fd_b, x + BLOCK, n, b->record.offset + b->first + at, path_b, err), rc, out);
        equal = memcmp(x, x + BLOCK, n) == 0;
    }
    *same = equal;
out:
    if (fd_a >= 0) {
        close(fd_a);
    }
    if (fd_b >= 0) {
        close(fd_b);
    }
    free(x);
    return rc;
}

fc_code fc_torch_same_extent(const fc_checkpoint *checkpoint, fc_dtype dtype, int ndim, const int64_t *sizes,
                             const torch_extent *a, const torch_extent *b, bool *same, fc_error *err) {
    bool alike = a->swap == b->swap && a->negate == b->negate && a->conjugate == b->conjugate;
    for (int i = 0; alike && i < ndim; i++) {
        alike = a->strides[i] == b->strides[i];
    }
    uint64_t span = span_of(a, ndim, sizes, fc_dtype_size(dtype));
    *same = alike && (span == 0 || (a->first == b->first && a->record.crc == b->record.crc && a->record.crc != 0 &&
                                    a->record.size == b->record.size));
    bool whole = span == a->record.size && span == b->record.size && a->record.crc != 0 && b->record.crc != 0;
    if (*same || !alike || whole || a->record.method != FC_ZIP_STORED || b->record.method != FC_ZIP_STORED ||
        span > MOST) {
        return FC_OK;
    }
    return compare_bytes(checkpoint, a, b, span, same, err);
}
