/*
 * Flat runs: which boxes of a tensor a stretch of its row-major elements is. What FSDP1's flat parameters and
 * DeepSpeed's partitions store of a parameter is such a stretch, cut without regard to its rows.
 */
#ifndef FSDPCKPT_SHARDING_FLAT_RUNS_H
#define FSDPCKPT_SHARDING_FLAT_RUNS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/box.h"

/** A walk over the boxes of a run. Private to fc_flat_run_*. */
typedef struct fc_flat_run {
    int ndim;
    const int64_t *shape;
    int64_t numel;   /* of shape */
    int64_t at, end; /* elements still to be given */
} fc_flat_run;

/**
 * Starts at the elements [start, end) of a tensor of `shape` (borrowed; ndim entries) in row-major order.
 * @return false when they do not lie within it, or the numbers make no sense.
 */
bool fc_flat_run_start(fc_flat_run *run, int ndim, const int64_t *shape, int64_t start, int64_t end);

/** The most boxes that a run of a tensor of `ndim` dimensions can be. */
static inline int fc_flat_run_most(int ndim) {
    return ndim > 1 ? 2 * ndim - 1 : 1;
}

/**
 * The next box, in the order of the elements. Each is a run itself, so its elements lie contiguous and row-major where
 * those of the run do; there are as few as that allows, at most fc_flat_run_most.
 * @param dims out: 2 × ndim numbers, offsets and sizes, as in fc_chunk.
 * @param start out: its first element, counted in the tensor.
 * @return false when there is none left; an empty run has none.
 */
bool fc_flat_run_next(fc_flat_run *run, int64_t *dims, int64_t *start);

#endif
