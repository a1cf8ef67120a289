/*
 * What the parts of the coverage share.
 */
#pragma once

#include "fsdpckpt/plan.h"

struct fc_coverage {
    const fc_checkpoint *checkpoint; /* for messages; may be NULL */
    const fc_tensor *tensor;
    int64_t low[FC_MAX_DIMS], high[FC_MAX_DIMS]; /* the region */
    size_t *chunks; /* the chunks that overlap the region, in the order of compare_chunks, without replicas */
    size_t count;
    /* A binary tree over runs of consecutive chunks; NULL if there are few. Node i has the children 2 i and 2 i + 1,
     * and 2 ndim numbers: the bounds of a box around all chunks of its run. */
    int64_t *bounds;
    uint64_t secret[2];
};

/* The bounds of a chunk along `d`, clipped to the region. */
static inline int64_t fc_clipped_low(const fc_coverage *c, size_t chunk, int d) {
    int64_t offset = c->tensor->chunks[chunk].dims[d];
    return offset > c->low[d] ? offset : c->low[d];
}

static inline int64_t fc_clipped_high(const fc_coverage *c, size_t chunk, int d) {
    const int64_t *dims = c->tensor->chunks[chunk].dims;
    int64_t end = dims[d] + dims[c->tensor->ndim + d];
    return end < c->high[d] ? end : c->high[d];
}

/** Whether a chunk, clipped to the region, holds an element. */
bool fc_coverage_chunk_holds(const fc_coverage *c, size_t chunk, const int64_t *point);

/** Fails because several chunks hold an element. */
fc_code fc_coverage_fail_overlap(const fc_coverage *c, const int64_t *point, fc_error *err);

/** Fails because no chunk holds an element. */
fc_code fc_coverage_fail_hole(const fc_coverage *c, const int64_t *point, fc_error *err);
