/*
 * Box arithmetic. Boxes come from the headers of checkpoints (formats/) and from layouts (mesh.c). Their numbers may be
 * hostile, so every function that may get unchecked boxes checks for overflow.
 */
#include "fsdpckpt/box.h"

#include "base/checked.h"

#include <string.h>

bool fc_numel(int ndim, const int64_t *sizes, int64_t *out) {
    int64_t n = 1;
    bool fits = true, empty = false;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] < 0) {
            return false;
        }
        empty = empty || sizes[d] == 0;
        fits = fits && fc_mul_i64(n, sizes[d], &n);
    }
    /* A shape like (0, 2^62, 2^62) is valid: it has no elements, although the product of the other sizes overflows. */
    if (empty) {
        n = 0;
    } else if (!fits) {
        return false;
    }
    *out = n;
    return true;
}

bool fc_same_sizes(int a_ndim, const int64_t *a, int b_ndim, const int64_t *b) {
    return a_ndim == b_ndim && (a_ndim == 0 || memcmp(a, b, (size_t)a_ndim * sizeof *a) == 0);
}

bool fc_is_empty(int ndim, const int64_t *sizes) {
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 0) {
            return true;
        }
    }
    return false;
}

int64_t fc_box_volume(const fc_box *box) {
    int64_t n = 0;
    return fc_numel(box->ndim, box->sizes, &n) ? n : 0;
}

bool fc_box_within(const fc_box *box, const int64_t *shape) {
    for (int d = 0; d < box->ndim; d++) {
        int64_t end;
        if (box->offsets[d] < 0 || box->sizes[d] < 0 || !fc_add_i64(box->offsets[d], box->sizes[d], &end) ||
            end > shape[d]) {
            return false;
        }
    }
    return true;
}

bool fc_box_equal(const fc_box *a, const fc_box *b) {
    if (a->ndim != b->ndim) {
        return false;
    }
    size_t bytes = (size_t)a->ndim * sizeof(int64_t);
    /* The arrays of a scalar may be NULL. */
    return bytes == 0 || (memcmp(a->offsets, b->offsets, bytes) == 0 && memcmp(a->sizes, b->sizes, bytes) == 0);
}

bool fc_box_intersect(const fc_box *a, const fc_box *b, int64_t *offsets, int64_t *sizes) {
    for (int d = 0; d < a->ndim; d++) {
        int64_t start = a->offsets[d] > b->offsets[d] ? a->offsets[d] : b->offsets[d];
        int64_t a_end = a->offsets[d] + a->sizes[d], b_end = b->offsets[d] + b->sizes[d];
        int64_t end = a_end < b_end ? a_end : b_end;
        if (start >= end) {
            return false;
        }
        offsets[d] = start;
        sizes[d] = end - start;
    }
    return true;
}

bool fc_row_major_strides(int ndim, const int64_t *sizes, int64_t *strides) {
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        /* torch computes strides as if a size of 0 were 1, so an empty tensor has strides too. */
        if (sizes[d] < 0 || !fc_mul_i64(stride, sizes[d] > 0 ? sizes[d] : 1, &stride)) {
            return false;
        }
    }
    return true;
}

bool fc_is_row_major(int ndim, const int64_t *sizes, const int64_t *strides) {
    int64_t expected = 1;
    bool in_order = true;
    for (int d = ndim - 1; d >= 0; d--) {
        if (sizes[d] == 0) {
            return true;
        }
        in_order = in_order && (sizes[d] == 1 || strides[d] == expected) && fc_mul_i64(expected, sizes[d], &expected);
    }
    return in_order;
}
