/*
 * What the fuzzers of layouts share: the input as a series of choices, and a tensor that they cut into chunks.
 */
#pragma once

#include "fsdpckpt/memory.h"

#include "fuzz.h"

enum { DIMS = 4, MOST_CHUNKS = 64, MOST_ELEMENTS = 4096 };

typedef struct choices {
    const uint8_t *data;
    size_t size;
} choices;

/* @return a number from 0 to `most`. */
static inline int64_t choose(choices *c, int64_t most) {
    if (c->size == 0 || most <= 0) {
        return 0;
    }
    c->size--;
    return *c->data++ % (most + 1);
}

typedef struct source_tensor {
    int ndim;
    int64_t shape[DIMS], strides[DIMS];
    int64_t dims[MOST_CHUNKS][2 * DIMS]; /* offsets and sizes of each chunk */
    size_t nchunks;
} source_tensor;

static inline int64_t index_of(const source_tensor *t, const int64_t *at) {
    int64_t index = 0;
    for (int d = 0; d < t->ndim; d++) {
        index += at[d] * t->strides[d];
    }
    return index;
}

/* Advances `at` to the next index in row-major order. It starts again after the last one. */
static inline void next_index(int ndim, const int64_t *sizes, int64_t *at) {
    for (int d = ndim - 1; d >= 0 && ++at[d] == sizes[d]; d--) {
        at[d] = 0;
    }
}

/* Cuts a box in two, again and again, as the input chooses. */
static inline void cut(source_tensor *t, choices *c, const int64_t *offsets, const int64_t *sizes, int depth) {
    const int d = t->ndim ? (int)choose(c, t->ndim - 1) : 0;
    if (depth > 0 && t->ndim > 0 && sizes[d] > 1 && choose(c, 3) > 0) {
        int64_t o[DIMS], s[DIMS];
        memcpy(o, offsets, sizeof o);
        memcpy(s, sizes, sizeof s);
        s[d] = 1 + choose(c, sizes[d] - 2);
        cut(t, c, o, s, depth - 1);
        o[d] += s[d];
        s[d] = sizes[d] - s[d];
        cut(t, c, o, s, depth - 1);
        return;
    }
    int64_t *dims = t->dims[t->nchunks++];
    memcpy(dims, offsets, (size_t)t->ndim * sizeof *dims);
    memcpy(dims + t->ndim, sizes, (size_t)t->ndim * sizeof *dims);
}

/* @return false if the tensor has too many elements. */
static inline bool make_tensor(source_tensor *t, choices *c) {
    static const int64_t zeros[DIMS];
    int64_t elements = 1;
    t->ndim = (int)choose(c, DIMS);
    t->nchunks = 0;
    for (int d = 0; d < t->ndim; d++) {
        t->shape[d] = choose(c, 9);
    }
    for (int d = t->ndim - 1; d >= 0; d--) {
        t->strides[d] = elements;
        elements *= t->shape[d] ? t->shape[d] : 1;
    }
    if (elements > MOST_ELEMENTS) {
        return false;
    }
    cut(t, c, zeros, t->shape, 5);
    return true;
}
