/*
 * A checkpoint in memory for tests of the engine: random tensors, cut at random and stored at random: raw in files with
 * any strides, inline, filtered as in HDF5, or decodable only by the format. Keeps the full tensors to compare with.
 */
#pragma once

#include "codec/strided.h"
#include "fsdpckpt/format.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cmocka.h>

enum { FAKE_FILES = 3, FAKE_TENSORS = 64, FAKE_CHUNKS = 128, FAKE_DIMS = 5, FAKE_CODECS = FC_CODEC_FORMAT + 1 };

typedef struct fake_chunk {
    int64_t dims[2 * FAKE_DIMS];
    fc_extent extent;
    unsigned char *decoded; /* for INLINE and FORMAT */
} fake_chunk;

typedef struct fake_tensor {
    char name[32];
    int64_t shape[FAKE_DIMS];
    fc_chunk chunks[FAKE_CHUNKS];
    fake_chunk details[FAKE_CHUNKS];
    unsigned char *truth; /* row-major, native */
    int64_t numel;
} fake_tensor;

typedef struct fake {
    char directory[64];
    char paths[FAKE_FILES][96];
    int fds[FAKE_FILES];
    uint64_t ends[FAKE_FILES];
    fc_file files[FAKE_FILES];
    fc_tensor tensors[FAKE_TENSORS];
    fake_tensor details[FAKE_TENSORS];
    fc_format format;
    fc_checkpoint checkpoint;
    bool only_raw; /* store everything FC_CODEC_RAW, contiguous */
    bool strided;  /* store everything FC_CODEC_RAW, native, with any strides */
} fake;

static inline fc_code fake_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index,
                                  fc_extent *out, fc_error *err) {
    (void)err;
    const fake *f = checkpoint->state;
    *out = f->details[tensor - f->tensors].details[index].extent;
    return FC_OK;
}

static inline fc_code fake_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf,
                                fc_error *err) {
    (void)err;
    const fake *f = checkpoint->state;
    const fake_chunk *chunk = &f->details[tensor - f->tensors].details[index];
    memcpy(buf, chunk->decoded, chunk->extent.decoded);
    return FC_OK;
}

static inline fake *fake_new(void) {
    fake *f = calloc(1, sizeof *f);
    assert_non_null(f);
    strcpy(f->directory, "/tmp/fsdpckpt-test-XXXXXX");
    assert_non_null(mkdtemp(f->directory));
    for (int i = 0; i < FAKE_FILES; i++) {
        snprintf(f->paths[i], sizeof f->paths[i], "%s/source-%d", f->directory, i);
        f->fds[i] = open(f->paths[i], O_RDWR | O_CREAT, 0600);
        assert_true(f->fds[i] >= 0);
        f->files[i] = (fc_file){f->paths[i], f->paths[i] + strlen(f->directory) + 1};
        f->ends[i] = (uint64_t)rand() % 100;
    }
    f->format = (fc_format){
        .name = "fake",
        .reader =
            {
                .extent = fake_extent,
                .read = fake_read,
            },
    };
    f->checkpoint = (fc_checkpoint){.format = &f->format,
                                    .path = f->directory,
                                    .files = f->files,
                                    .nfiles = FAKE_FILES,
                                    .tensors = f->tensors,
                                    .state = f};
    return f;
}

static inline void fake_free(fake *f) {
    for (size_t t = 0; t < f->checkpoint.ntensors; t++) {
        for (size_t c = 0; c < f->tensors[t].nchunks; c++) {
            free(f->details[t].details[c].decoded);
        }
        free(f->details[t].truth);
    }
    for (int i = 0; i < FAKE_FILES; i++) {
        close(f->fds[i]);
        unlink(f->paths[i]);
    }
    rmdir(f->directory);
    free(f);
}

/* Makes strides for `sizes` with the dimensions in random order and some gaps. @return elements spanned. */
static inline int64_t fake_strides(int ndim, const int64_t *sizes, bool plain, int64_t *strides) {
    int order[FAKE_DIMS];
    for (int i = 0; i < ndim; i++) {
        int j = plain || rand() % 2 ? i : rand() % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[order[i]] = stride;
        stride *= sizes[order[i]] + (!plain && rand() % 4 == 0 ? rand() % 5 : 0);
    }
    return stride;
}

static inline uint64_t fake_append(fake *f, int file, const void *bytes, size_t size) {
    uint64_t at = f->ends[file] + (uint64_t)rand() % 50;
    assert_int_equal(pwrite(f->fds[file], bytes, size, (off_t)at), (ssize_t)size);
    f->ends[file] = at + size;
    return at;
}

/* Deflates `size` bytes and sets the filters of the extent. */
static inline void fake_filter(fake *f, fc_extent *extent, const unsigned char *bytes, size_t size) {
    uLongf length = compressBound(size);
    unsigned char *out = malloc(length);
    assert_non_null(out);
    assert_int_equal(compress2(out, &length, bytes, size, 1), Z_OK);
    extent->filters = (fc_filters){.items = {{.id = 1}}, .count = 1};
    extent->offset = fake_append(f, (int)extent->file, out, length);
    extent->length = length;
    free(out);
}

/* Stores the chunk `dims` of tensor `t` with a random codec, strides and byte order. */
static inline void fake_store(fake *f, size_t t, size_t c) {
    fc_tensor *tensor = &f->tensors[t];
    fake_tensor *details = &f->details[t];
    fake_chunk *chunk = &details->details[c];
    const fc_dtype_info *type = fc_dtype_get(tensor->dtype);
    int ndim = tensor->ndim;
    const int64_t *offsets = chunk->dims, *sizes = chunk->dims + ndim;
    fc_extent *extent = &chunk->extent;
    int64_t truth_strides[FAKE_DIMS], at = 0;
    fc_row_major_strides(ndim, details->shape, truth_strides);
    for (int d = 0; d < ndim; d++) {
        at += offsets[d] * truth_strides[d];
    }
    int64_t span = fake_strides(ndim, sizes, f->only_raw, extent->strides);
    extent->first = f->only_raw ? 0 : (uint64_t)(rand() % 3) * type->size;
    extent->decoded = extent->length = extent->first + (uint64_t)span * type->size;
    unsigned char *bytes = calloc(1, extent->decoded);
    assert_non_null(bytes);
    fc_strided copy;
    assert_true(fc_strided_make(&copy, ndim, sizes, truth_strides, extent->strides, type->size));
    fc_strided_copy(&copy, details->truth + at * type->size, bytes + extent->first);
    extent->swap = !f->only_raw && !f->strided && rand() % 4 == 0 && type->swap_size > 1;
    if (extent->swap) {
        fc_strided_swap(&copy, bytes + extent->first, type->swap_size);
    }
    extent->codec = f->only_raw || f->strided ? FC_CODEC_RAW : (fc_codec)(rand() % FAKE_CODECS);
    extent->file = (uint32_t)rand() % FAKE_FILES;
    if (extent->codec == FC_CODEC_FILTERED) {
        fake_filter(f, extent, bytes, extent->decoded);
    } else if (extent->codec == FC_CODEC_RAW) {
        extent->offset = fake_append(f, (int)extent->file, bytes, extent->length);
    } else {
        chunk->decoded = bytes;
        extent->bytes = extent->codec == FC_CODEC_INLINE ? bytes : NULL;
    }
    if (!chunk->decoded) {
        free(bytes);
    }
    details->chunks[c] =
        (fc_chunk){.dims = chunk->dims, .place = fc_place_bytes(extent->file, extent->offset, extent->length)};
}

static inline void fake_cut(fake *f, size_t t, const int64_t *offsets, const int64_t *sizes, int depth) {
    fc_tensor *tensor = &f->tensors[t];
    int ndim = tensor->ndim, d = ndim ? rand() % ndim : 0;
    if (depth == 0 || ndim == 0 || sizes[d] < 2) {
        size_t c = tensor->nchunks++;
        fake_chunk *chunk = &f->details[t].details[c];
        for (int i = 0; i < ndim; i++) {
            chunk->dims[i] = offsets[i];
            chunk->dims[ndim + i] = sizes[i];
        }
        fake_store(f, t, c);
        return;
    }
    int64_t o[FAKE_DIMS], s[FAKE_DIMS], at = 1 + rand() % (sizes[d] - 1);
    for (int i = 0; i < ndim; i++) {
        o[i] = offsets[i];
        s[i] = sizes[i];
    }
    s[d] = at;
    fake_cut(f, t, o, s, depth - 1);
    o[d] = offsets[d] + at;
    s[d] = sizes[d] - at;
    fake_cut(f, t, o, s, depth - 1);
}

/* Adds a tensor with random contents, cut `depth` times. @return its index. */
static inline size_t fake_add(fake *f, fc_dtype dtype, int ndim, const int64_t *shape, int depth) {
    size_t t = f->checkpoint.ntensors++;
    assert_true(t < FAKE_TENSORS);
    fake_tensor *details = &f->details[t];
    snprintf(details->name, sizeof details->name, "layers.%zu.weight", t);
    for (int d = 0; d < ndim; d++) {
        details->shape[d] = shape[d];
    }
    f->tensors[t] = (fc_tensor){
        .name = details->name, .dtype = dtype, .ndim = ndim, .shape = details->shape, .chunks = details->chunks};
    assert_true(fc_numel(ndim, shape, &details->numel));
    size_t size = (size_t)details->numel * fc_dtype_size(dtype);
    details->truth = malloc(size ? size : 1);
    assert_non_null(details->truth);
    for (size_t i = 0; i < size; i++) {
        details->truth[i] = (unsigned char)(rand() >> 5);
    }
    if (details->numel > 0) {
        int64_t origin[FAKE_DIMS] = {0};
        fake_cut(f, t, origin, shape, depth);
    }
    return t;
}
