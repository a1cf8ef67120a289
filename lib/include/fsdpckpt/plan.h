/*
 * Plans: which chunks of the source cover a box of the target. Pure arithmetic without I/O.
 */
#ifndef FSDPCKPT_PLAN_H
#define FSDPCKPT_PLAN_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The chunks of one tensor, proved to cover each of its elements exactly once, and sorted so that those that overlap a
 * box are found without a search through all. Of chunks with equal boxes (replicas) only the first is kept.
 */
typedef struct fc_coverage fc_coverage;

/**
 * Proves that the chunks of `tensor` cover it exactly once, in O(n log n) for the shardings that occur in practice.
 * @return FC_ECORRUPT with the tensor, and the box of the first hole or the first two chunks that overlap.
 */
fc_code fc_coverage_new(const fc_tensor *tensor, fc_coverage **out, fc_error *err);

/**
 * Like fc_coverage_new, but proves only `region`, and keeps only chunks that overlap it.
 * @param region     a box of the tensor; NULL: the whole tensor.
 * @param checkpoint the checkpoint of the tensor, so that messages name the files of chunks; may be NULL.
 */
fc_code fc_coverage_within(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                           fc_coverage **out, fc_error *err);

/**
 * Lists the chunks of a tensor without a proof that they cover it. Many small regions are then found with
 * fc_coverage_part, each without a search through all chunks.
 */
fc_code fc_coverage_list(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_coverage **out, fc_error *err);

/** Like fc_coverage_within for the tensor of `list`, from fc_coverage_list; the result does not refer to it. */
fc_code fc_coverage_part(const fc_coverage *list, const fc_box *region, fc_coverage **out, fc_error *err);

/** Frees `coverage`. NULL is allowed. */
void fc_coverage_free(fc_coverage *coverage);

/** Returns the number of chunks that cover the region. Of replicas, one counts. */
size_t fc_coverage_count(const fc_coverage *coverage);

/** Returns the index, in the tensor's chunks, of the chunk at a position in ascending order of offsets. */
size_t fc_coverage_chunk(const fc_coverage *coverage, size_t position);

/** The part of a box that one chunk covers. */
typedef struct fc_overlap {
    size_t chunk;                 /**< index into the tensor's chunks */
    int64_t offsets[FC_MAX_DIMS]; /**< where the overlap begins in the global tensor, in elements */
    int64_t sizes[FC_MAX_DIMS];
} fc_overlap;

/**
 * Calls `visit` for each chunk that overlaps `box`, in ascending order of offsets. Stops at the first code other than
 * FC_OK and returns it.
 */
fc_code fc_coverage_visit(const fc_coverage *coverage, const fc_box *box,
                          fc_code (*visit)(void *context, const fc_overlap *overlap, fc_error *err), void *context,
                          fc_error *err);

/** An iterator over the tiles of a box: boxes whose elements are contiguous in the row-major order of that box. */
typedef struct fc_tiles {
    int ndim;
    int64_t box_offsets[FC_MAX_DIMS];
    int64_t box_sizes[FC_MAX_DIMS];
    int64_t limit;    /**< most elements per tile */
    int64_t multiple; /**< tiles begin at multiples of this many elements, in row-major order, if the rows allow it */
    int64_t next;     /**< the element, in row-major order, at which the next tile begins */
    int64_t total;    /**< the element at which the iteration ends */
} fc_tiles;

/** One tile, in global coordinates. */
typedef struct fc_tile {
    int64_t start; /**< number of elements before it in the row-major order of the box */
    int64_t count; /**< number of its elements */
    int64_t offsets[FC_MAX_DIMS];
    int64_t sizes[FC_MAX_DIMS];
} fc_tile;

/** Begins an iteration over `box`. See fc_tiles for `limit` and `multiple`, which are at least 1. */
void fc_tiles_begin(fc_tiles *tiles, const fc_box *box, int64_t limit, int64_t multiple);

/** Limits the iteration to elements `first` to `end`, exclusive, in row-major order. Call it before the first tile. */
void fc_tiles_only(fc_tiles *tiles, int64_t first, int64_t end);

/** Returns the next tile in `tile`. @return false when none is left. */
bool fc_tiles_next(fc_tiles *tiles, fc_tile *tile);

#ifdef __cplusplus
}
#endif
#endif
