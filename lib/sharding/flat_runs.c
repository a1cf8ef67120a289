/*
 * Splits a run of row-major elements into boxes: the elements up to the next whole row, the rows up to the next whole
 * plane, and so on, then back down to the tail. Used by formats whose shards are runs of flattened parameters.
 */
#include "sharding/flat_runs.h"

bool fc_flat_run_start(fc_flat_run *run, int ndim, const int64_t *shape, int64_t start, int64_t end) {
    *run = (fc_flat_run){.ndim = ndim, .shape = shape, .at = start, .end = end};
    return fc_numel(ndim, shape, &run->numel) && start >= 0 && start <= end && end <= run->numel;
}

bool fc_flat_run_next(fc_flat_run *run, int64_t *dims, int64_t *start) {
    int64_t *offsets = dims, *sizes = dims + run->ndim;
    int64_t stride = run->numel, taken = 1;
    bool found = false;
    if (run->at >= run->end) {
        return false;
    }
    /* The outermost dimension in which the run covers a whole slice sets the extent of the box.
     */
    for (int d = 0; d < run->ndim; d++) {
        stride /= run->shape[d]; /* never 0, because the run has an element */
        int64_t index = run->at / stride % run->shape[d];
        int64_t whole = (run->end - run->at) / stride, rest = run->shape[d] - index;
        offsets[d] = index;
        sizes[d] = found ? run->shape[d] : 1;
        if (!found && run->at % stride == 0 && whole > 0) {
            found = true;
            sizes[d] = whole < rest ? whole : rest;
            taken = sizes[d] * stride;
        }
    }
    *start = run->at;
    run->at += taken;
    return true;
}
