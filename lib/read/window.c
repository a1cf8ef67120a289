/*
 * How much of a strided copy one read covers: see window.h.
 */
#include "read/window.h"

#include "read/tuning.h"

fc_window fc_window_choose(const fc_strided *copy, size_t scratch) {
    fc_window w = {copy->n, 1};
    int64_t span = copy->unit;
    if (span >= FC_DIRECT_RUN || (uint64_t)span > scratch) {
        return w;
    }
    while (w.whole > 0) {
        const fc_axis *axis = &copy->axes[w.whole - 1];
        if (axis->src - span > FC_GAP_READ) {
            break;
        }
        int64_t wider = span + axis->src * (axis->size - 1);
        if ((uint64_t)wider > scratch) {
            w.group = ((int64_t)scratch - span) / axis->src + 1; /* src > 0, otherwise it would have fit */
            break;
        }
        span = wider;
        w.whole--;
    }
    return w;
}
