/*
 * Boxes: the half-open hyper-rectangle of a global tensor that one chunk holds, and their arithmetic.
 * A box is what DCP calls ChunkStorageMetadata(offsets, sizes) and ShardMetadata (shard_offsets, shard_sizes).
 */
#ifndef FSDPCKPT_BOX_H
#define FSDPCKPT_BOX_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** HDF5's H5S_MAX_RANK. torch allows 64; a checkpoint with more than 32 is FC_EUNSUPPORTED. */
#define FC_MAX_DIMS 32

/**
 * `ndim` offsets and sizes in elements, borrowed from whoever made the box. ndim 0 is a scalar of volume 1;
 * a size of 0 makes an empty box. A valid box has 0 <= offset, 0 <= size, and offset + size does not overflow.
 */
typedef struct fc_box {
    int ndim;
    const int64_t *offsets;
    const int64_t *sizes;
} fc_box;

/** Product of the sizes. @return false when it does not fit int64_t or a size is negative. */
bool fc_numel(int ndim, const int64_t *sizes, int64_t *out);

/** The volume of a box that is known to be valid. */
int64_t fc_box_volume(const fc_box *box);

/** Whether `box` is valid and lies within a tensor of `shape` (box->ndim entries). */
bool fc_box_within(const fc_box *box, const int64_t *shape);

/** Same offsets and same sizes. */
bool fc_box_equal(const fc_box *a, const fc_box *b);

/**
 * The intersection of two boxes of the same ndim, into `offsets` and `sizes` (ndim entries each).
 * @return true when it holds at least one element; false leaves the outputs unspecified.
 */
bool fc_box_intersect(const fc_box *a, const fc_box *b, int64_t *offsets, int64_t *sizes);

/** Row-major element strides of an array with `sizes`, into `strides`. @return false on overflow. */
bool fc_row_major_strides(int ndim, const int64_t *sizes, int64_t *strides);

/**
 * Whether elements with these strides lie one behind the other in row-major order. As in torch, the stride of a
 * dimension of size 1 does not matter, and an array without elements is always in order.
 */
bool fc_is_row_major(int ndim, const int64_t *sizes, const int64_t *strides);

#ifdef __cplusplus
}
#endif
#endif
