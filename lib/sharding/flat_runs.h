/*
 * Flat runs: the boxes that a run of a tensor's row-major elements consists of. FSDP1's flat parameters and DeepSpeed's
 * partitions store such runs of a parameter, without regard to its rows.
 */
#pragma once

#include "fsdpckpt/box.h"

/** An iterator over the boxes of a run. Its fields are private to fc_flat_run_*. */
typedef struct fc_flat_run {
    int ndim;
    const int64_t *shape;
    int64_t numel;   /* the number of elements of `shape` */
    int64_t at, end; /* the elements that remain */
} fc_flat_run;

/**
 * Starts iterating over elements [start, end) of a tensor of `shape` (borrowed; ndim entries) in row-major order.
 * @return false when the range is not within the tensor, or the shape is invalid.
 */
bool fc_flat_run_start(fc_flat_run *run, int ndim, const int64_t *shape, int64_t start, int64_t end);

/** @return the most boxes that a run of a tensor of `ndim` dimensions can consist of. */
static inline int fc_flat_run_most(int ndim) {
    return ndim > 1 ? 2 * ndim - 1 : 1;
}

/**
 * Returns the next box, in the order of the elements. Each box is a run itself, so it is contiguous and row-major
 * within the run. The boxes are as few as that allows, at most fc_flat_run_most.
 * @param dims receives 2 × ndim numbers, offsets and then sizes, as in fc_chunk.
 * @param start receives the index of the box's first element in the tensor.
 * @return false when no box is left. An empty run has none.
 */
bool fc_flat_run_next(fc_flat_run *run, int64_t *dims, int64_t *start);
