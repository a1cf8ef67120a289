/*
 * Plans: which source chunks cover a wanted box. Pure arithmetic, no I/O.
 */
#ifndef FSDPCKPT_PLAN_H
#define FSDPCKPT_PLAN_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The chunks of one tensor, sorted so that those meeting a box are found without looking at all of them, and proved
 * to cover the tensor: each element exactly once. Exact duplicates of a box (replicas) are kept once, the first.
 */
typedef struct fc_coverage fc_coverage;

/**
 * Proves that the chunks of `tensor` cover it exactly once. O(n log n) in the chunks for the cuts that occur.
 * @return FC_ECORRUPT naming the tensor and the first hole (its box) or the first two chunks that overlap.
 */
fc_code fc_coverage_new(const fc_tensor *tensor, fc_coverage **out, fc_error *err);

/**
 * Like fc_coverage_new, with the proof limited to `region` (NULL: the whole tensor): only chunks that meet it are kept.
 * @param checkpoint of the tensor, so that messages name the files of its chunks; may be NULL.
 */
fc_code fc_coverage_within(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                           fc_coverage **out, fc_error *err);
void fc_coverage_free(fc_coverage *coverage);

/** A source chunk that meets a wanted box. */
typedef struct fc_overlap {
    size_t chunk;                 /**< index into the tensor's chunks */
    int64_t offsets[FC_MAX_DIMS]; /**< of the intersection, in the global tensor */
    int64_t sizes[FC_MAX_DIMS];
} fc_overlap;

/**
 * Calls `visit` for each chunk that meets `box`, in ascending order of offsets; stops at the first code other than
 * FC_OK and returns it.
 */
fc_code fc_coverage_visit(const fc_coverage *coverage, const fc_box *box,
                          fc_code (*visit)(void *context, const fc_overlap *piece, fc_error *err), void *context,
                          fc_error *err);

/** Walks the row-major tiles of a box: each a box whose elements are contiguous in the row-major order of `box`. */
typedef struct fc_tiles {
    int ndim;
    int64_t box_offsets[FC_MAX_DIMS];
    int64_t box_sizes[FC_MAX_DIMS];
    int64_t limit;    /**< elements a tile at most */
    int64_t multiple; /**< elements: tiles begin at multiples of this in the row-major order where rows allow it */
    int64_t next;     /**< elements already given out (or left out), in row-major order */
    int64_t total;    /**< elements up to the end of what is walked */
} fc_tiles;

/** One tile, in global coordinates. */
typedef struct fc_tile {
    int64_t start; /**< elements before it in the row-major order of the box */
    int64_t count;
    int64_t offsets[FC_MAX_DIMS];
    int64_t sizes[FC_MAX_DIMS];
} fc_tile;

/** Starts over `box` with tiles of at most `limit` elements (at least 1), preferably begun at a `multiple` (1: any). */
void fc_tiles_begin(fc_tiles *tiles, const fc_box *box, int64_t limit, int64_t multiple);

/** Walks only the elements from `first` up to `end` of the box's row-major order. To be called before the first tile.
 */
void fc_tiles_only(fc_tiles *tiles, int64_t first, int64_t end);

/** The next tile. @return false when there is none left (at once for an empty box). */
bool fc_tiles_next(fc_tiles *tiles, fc_tile *tile);

#ifdef __cplusplus
}
#endif
#endif
