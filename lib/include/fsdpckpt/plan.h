/*
 * Plans: which chunks of the source cover a box of the target. Pure arithmetic without I/O.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

FC_BEGIN_DECLS

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

/** Frees `coverage`. NULL is allowed. */
void fc_coverage_free(fc_coverage *coverage);

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

FC_END_DECLS
