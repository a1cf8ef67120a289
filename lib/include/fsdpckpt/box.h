/*
 * Boxes: half-open hyper-rectangles within a global tensor, and their arithmetic. In DCP a box is the offsets and sizes
 * of a ChunkStorageMetadata, or the shard_offsets and shard_sizes of a ShardMetadata.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

/** The most dimensions of a tensor: HDF5's H5S_MAX_RANK. torch allows 64; more than 32 are FC_EUNSUPPORTED. */
#define FC_MAX_DIMS 32

/**
 * `ndim` offsets and sizes in elements. The box borrows both arrays. With ndim 0 it is a scalar of volume 1; a size of
 * 0 makes it empty. A box is valid if all offsets and sizes are at least 0 and no offset + size overflows.
 */
typedef struct fc_box {
    int ndim;
    const int64_t *offsets;
    const int64_t *sizes;
} fc_box;

/** Computes the product of the sizes. @return false when a size is negative or the product does not fit in int64_t. */
bool fc_numel(int ndim, const int64_t *sizes, int64_t *out);

/** Returns whether two shapes have the same dimensions. The arrays may be NULL if there are none. */
bool fc_same_sizes(int a_ndim, const int64_t *a, int b_ndim, const int64_t *b);

/** Returns whether one of the sizes is 0. */
bool fc_is_empty(int ndim, const int64_t *sizes);

/** Returns the number of elements of a valid box. */
int64_t fc_box_volume(const fc_box *box);

/** Returns whether `box` is valid and within a tensor of `shape` (box->ndim entries). */
bool fc_box_within(const fc_box *box, const int64_t *shape);

/** Returns whether offsets and sizes are equal. */
bool fc_box_equal(const fc_box *a, const fc_box *b);

/**
 * Computes the intersection of two boxes of the same ndim into `offsets` and `sizes` (ndim entries each).
 * @return whether it has an element; if not, the outputs are unspecified.
 */
bool fc_box_intersect(const fc_box *a, const fc_box *b, int64_t *offsets, int64_t *sizes);

/** Computes the row-major strides, in elements, of an array with `sizes`. @return false on overflow. */
bool fc_row_major_strides(int ndim, const int64_t *sizes, int64_t *strides);

/**
 * Returns whether elements with these strides are contiguous in row-major order. As in torch, strides of dimensions of
 * size 1 are ignored, and an array without elements is contiguous.
 */
bool fc_is_row_major(int ndim, const int64_t *sizes, const int64_t *strides);

FC_END_DECLS
