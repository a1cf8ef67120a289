/*
 * Says where the chunks of a tensor do not cover it exactly once.
 */
#include "base/checked.h"
#include "plan/box_text.h"
#include "plan/coverage_private.h"

#include <inttypes.h>

bool fc_coverage_chunk_holds(const fc_coverage *c, size_t chunk, const int64_t *point) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        if (point[d] < fc_clipped_low(c, chunk, d) || point[d] >= fc_clipped_high(c, chunk, d)) {
            return false;
        }
    }
    return true;
}

static const char *file_of(const fc_coverage *c, size_t chunk) {
    const fc_file *file = c->checkpoint ? fc_chunk_file(c->checkpoint, &c->tensor->chunks[chunk]) : NULL;
    return file ? file->name : NULL;
}

fc_code fc_coverage_fail_overlap(const fc_coverage *c, const int64_t *point, fc_error *err) {
    size_t found[2] = {0, 0};
    int n = 0;
    for (size_t i = 0; i < c->count && n < 2; i++) {
        if (fc_coverage_chunk_holds(c, c->chunks[i], point)) {
            found[n++] = c->chunks[i];
        }
    }
    const fc_tensor *tensor = c->tensor;
    fc_box a = fc_chunk_box(tensor, &tensor->chunks[found[0]]), b = fc_chunk_box(tensor, &tensor->chunks[found[1]]);
    const char *file_a = file_of(c, found[0]), *file_b = file_of(c, found[1]);
    if (!file_a || !file_b) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: chunk %zu at %s and chunk %zu at %s overlap", tensor->name,
                       found[0], fc_box_to_text(&a).s, found[1], fc_box_to_text(&b).s);
    }
    return fc_fail(err, FC_ECORRUPT, "tensor %s: chunk %zu at %s (file %s) and chunk %zu at %s (file %s) overlap",
                   tensor->name, found[0], fc_box_to_text(&a).s, file_a, found[1], fc_box_to_text(&b).s, file_b);
}

/* Grows the hole at `point` to a maximal box, starting with the last dimension. */
static void grow_hole(const fc_coverage *c, const int64_t *point, int64_t *sizes) {
    int ndim = c->tensor->ndim;
    for (int d = 0; d < ndim; d++) {
        sizes[d] = 1;
    }
    for (int d = ndim - 1; d >= 0; d--) {
        int64_t end = c->high[d];
        for (size_t i = 0; i < c->count; i++) {
            bool in_the_way = fc_clipped_low(c, c->chunks[i], d) > point[d];
            for (int e = 0; e < ndim && in_the_way; e++) {
                in_the_way = e == d || (fc_clipped_low(c, c->chunks[i], e) < point[e] + sizes[e] &&
                                        fc_clipped_high(c, c->chunks[i], e) > point[e]);
            }
            if (in_the_way && fc_clipped_low(c, c->chunks[i], d) < end) {
                end = fc_clipped_low(c, c->chunks[i], d);
            }
        }
        sizes[d] = end - point[d];
    }
}

/* Counts the elements of the region that chunks cover. @return false when overlaps elsewhere make the count useless. */
static bool count_covered(const fc_coverage *c, int64_t total, int64_t *covered) {
    *covered = 0;
    for (size_t i = 0; i < c->count; i++) {
        int64_t volume = 1;
        for (int d = 0; d < c->tensor->ndim; d++) {
            volume *= fc_clipped_high(c, c->chunks[i], d) - fc_clipped_low(c, c->chunks[i], d);
        }
        if (!fc_add_i64(*covered, volume, covered)) {
            return false;
        }
    }
    return *covered < total;
}

fc_code fc_coverage_fail_hole(const fc_coverage *c, const int64_t *point, fc_error *err) {
    int64_t sizes[FC_MAX_DIMS];
    grow_hole(c, point, sizes);
    fc_box hole = {c->tensor->ndim, point, sizes};
    int64_t total = 1, covered;
    for (int d = 0; d < c->tensor->ndim; d++) {
        total *= c->high[d] - c->low[d];
    }
    if (!count_covered(c, total, &covered)) {
        return fc_fail(err, FC_ECORRUPT,
                       "tensor %s: elements %s are in no chunk and others in several: the metadata is damaged",
                       c->tensor->name, fc_box_to_text(&hole).s);
    }
    return fc_fail(err, FC_ECORRUPT,
                   "tensor %s: elements %s are in no chunk (%" PRId64 " of %" PRId64
                   " elements covered): a shard is missing or the metadata is damaged",
                   c->tensor->name, fc_box_to_text(&hole).s, covered, total);
}
