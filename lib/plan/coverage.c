/*
 * Coverage: finds the chunks of a tensor that overlap a box, and proves that they cover it exactly once. The result is
 * a sorted list of chunks that the engine searches for every tile.
 *
 * The proof works for boxes of any shape without comparing pairs. Let f(e) be the number of chunks that contain element
 * e; f must be 1 inside the region and 0 outside. A sum of boxes is determined by its signed corners (+1 at a corner
 * with an even number of upper bounds, -1 with an odd number): f(e) is the sum over all corners q <= e, in every
 * dimension. So f is right if and only if the corners of the chunks, minus those of the region, cancel at every point.
 * That takes one sort of n · 2^k corners, where k is the number of dimensions that are cut at all. Moreover, the first
 * point p (in lexicographic order) that does not cancel is the first element that is not covered exactly once: no other
 * uncancelled corner is <= p, so f(p) - 1 is the sum at p. A negative sum is a hole, a positive one an overlap.
 */
#include "fsdpckpt/plan.h"

#include "base/checked.h"
#include "base/try.h"
#include "plan/box_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The most corners: 2^24 are 4 million chunks cut in two dimensions, or 16 thousand cut in ten. Sorting takes 128 MiB.
 */
enum { MAX_CORNERS = 1 << 24 };

struct fc_coverage {
    const fc_checkpoint *checkpoint; /* for messages; may be NULL */
    const fc_tensor *tensor;
    int64_t low[FC_MAX_DIMS], high[FC_MAX_DIMS]; /* the region */
    size_t *chunks; /* the chunks that overlap the region, in the order of compare_chunks, without replicas */
    size_t count;
    int key;        /* the first dimension along which the region is cut; ndim when there is none */
    int64_t *reach; /* reach[i]: the largest end along `key` of chunks[0 … i] */
};

/* The bounds of a chunk along `d`, clipped to the region. */
static int64_t clipped_low(const fc_coverage *c, size_t chunk, int d) {
    int64_t offset = c->tensor->chunks[chunk].dims[d];
    return offset > c->low[d] ? offset : c->low[d];
}

static int64_t clipped_high(const fc_coverage *c, size_t chunk, int d) {
    const int64_t *dims = c->tensor->chunks[chunk].dims;
    int64_t end = dims[d] + dims[c->tensor->ndim + d];
    return end < c->high[d] ? end : c->high[d];
}

static int compare_i64(int64_t a, int64_t b) {
    return (a > b) - (a < b);
}

/* Sorts by clipped offsets, the order in which the region is walked. Then by whole boxes, so that replicas become
   neighbours, then by index, so that the first replica leads. */
static int compare_chunks(const void *pa, const void *pb, void *context) {
    const fc_coverage *c = context;
    size_t a = *(const size_t *)pa, b = *(const size_t *)pb;
    int ndim = c->tensor->ndim;
    for (int d = 0; d < ndim; d++) {
        int order = compare_i64(clipped_low(c, a, d), clipped_low(c, b, d));
        if (order) {
            return order;
        }
    }
    const int64_t *da = c->tensor->chunks[a].dims, *db = c->tensor->chunks[b].dims;
    for (int d = 0; d < 2 * ndim; d++) {
        int order = compare_i64(da[d], db[d]);
        if (order) {
            return order;
        }
    }
    return (a > b) - (a < b);
}

static bool same_box(const fc_tensor *tensor, size_t a, size_t b) {
    fc_box box_a = fc_chunk_box(tensor, &tensor->chunks[a]), box_b = fc_chunk_box(tensor, &tensor->chunks[b]);
    return fc_box_equal(&box_a, &box_b);
}

static bool meets_region(const fc_coverage *c, size_t chunk) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        if (clipped_low(c, chunk, d) >= clipped_high(c, chunk, d)) {
            return false;
        }
    }
    return true;
}

/* Lists the chunks that overlap the region, sorted and without replicas. */
static fc_code select_chunks(fc_coverage *c, fc_error *err) {
    const fc_tensor *tensor = c->tensor;
    size_t bytes;
    if (!fc_mul_size(tensor->nchunks, sizeof *c->chunks, &bytes)) {
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", tensor->name);
    }
    c->chunks = malloc(bytes ? bytes : 1);
    if (!c->chunks) {
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", tensor->name);
    }
    for (size_t i = 0; i < tensor->nchunks; i++) {
        fc_box box = fc_chunk_box(tensor, &tensor->chunks[i]);
        if (!fc_box_within(&box, tensor->shape)) {
            return fc_fail(err, FC_ECORRUPT, "tensor %s: chunk %zu at %s is outside the tensor", tensor->name, i,
                           fc_box_to_text(&box).s);
        }
        if (meets_region(c, i)) {
            c->chunks[c->count++] = i;
        }
    }
    qsort_r(c->chunks, c->count, sizeof *c->chunks, compare_chunks, c);
    size_t kept = 0;
    for (size_t i = 0; i < c->count; i++) {
        if (kept == 0 || !same_box(tensor, c->chunks[kept - 1], c->chunks[i])) {
            c->chunks[kept++] = c->chunks[i];
        }
    }
    c->count = kept;
    return FC_OK;
}

/* Finds the dimensions along which some chunk does not span the region. @return their number. */
static int cut_dimensions(const fc_coverage *c, int *dims) {
    int n = 0;
    for (int d = 0; d < c->tensor->ndim; d++) {
        for (size_t i = 0; i < c->count; i++) {
            if (clipped_low(c, c->chunks[i], d) != c->low[d] || clipped_high(c, c->chunks[i], d) != c->high[d]) {
                dims[n++] = d;
                break;
            }
        }
    }
    return n;
}

/* A corner of a box. Bit j of `mask` selects the upper bound along the j-th cut dimension. Position `count` is the
 * region. */
typedef struct corner {
    uint32_t position;
    uint32_t mask;
} corner;

typedef struct corner_set {
    const fc_coverage *coverage;
    int ncut;
    int cut[FC_MAX_DIMS];
} corner_set;

static int64_t corner_at(const corner_set *set, const corner *k, int j) {
    const fc_coverage *c = set->coverage;
    int d = set->cut[j];
    bool upper = k->mask >> j & 1;
    if (k->position == c->count) {
        return upper ? c->high[d] : c->low[d];
    }
    return upper ? clipped_high(c, c->chunks[k->position], d) : clipped_low(c, c->chunks[k->position], d);
}

static int compare_corners(const void *a, const void *b, void *context) {
    const corner_set *set = context;
    for (int j = 0; j < set->ncut; j++) {
        int order = compare_i64(corner_at(set, a, j), corner_at(set, b, j));
        if (order) {
            return order;
        }
    }
    return 0;
}

static int64_t corner_sign(const corner_set *set, const corner *k) {
    bool odd = __builtin_popcount(k->mask) & 1;
    bool region = k->position == set->coverage->count;
    return odd == region ? 1 : -1;
}

/* Finds the first point where the sorted corners do not cancel. @return their sum there, or 0 when all cancel. */
static int64_t first_imbalance(corner_set *set, const corner *corners, size_t n, const corner **where) {
    for (size_t i = 0; i < n;) {
        int64_t sum = 0;
        size_t j = i;
        for (; j < n && compare_corners(&corners[i], &corners[j], set) == 0; j++) {
            sum += corner_sign(set, &corners[j]);
        }
        if (sum != 0) {
            *where = &corners[i];
            return sum;
        }
        i = j;
    }
    return 0;
}

static const char *file_of(const fc_coverage *c, size_t chunk) {
    uint32_t file = c->tensor->chunks[chunk].file;
    return c->checkpoint && file < c->checkpoint->nfiles ? c->checkpoint->files[file].name : NULL;
}

static bool chunk_holds(const fc_coverage *c, size_t chunk, const int64_t *point) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        if (point[d] < clipped_low(c, chunk, d) || point[d] >= clipped_high(c, chunk, d)) {
            return false;
        }
    }
    return true;
}

static fc_code fail_overlap(const fc_coverage *c, const int64_t *point, fc_error *err) {
    size_t found[2] = {0, 0};
    int n = 0;
    for (size_t i = 0; i < c->count && n < 2; i++) {
        if (chunk_holds(c, c->chunks[i], point)) {
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
            bool in_the_way = clipped_low(c, c->chunks[i], d) > point[d];
            for (int e = 0; e < ndim && in_the_way; e++) {
                in_the_way = e == d || (clipped_low(c, c->chunks[i], e) < point[e] + sizes[e] &&
                                        clipped_high(c, c->chunks[i], e) > point[e]);
            }
            if (in_the_way && clipped_low(c, c->chunks[i], d) < end) {
                end = clipped_low(c, c->chunks[i], d);
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
            volume *= clipped_high(c, c->chunks[i], d) - clipped_low(c, c->chunks[i], d);
        }
        if (!fc_add_i64(*covered, volume, covered)) {
            return false;
        }
    }
    return *covered < total;
}

static fc_code fail_hole(const fc_coverage *c, const int64_t *point, fc_error *err) {
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

static fc_code fail_imbalance(const corner_set *set, const corner *where, int64_t sum, fc_error *err) {
    int64_t point[FC_MAX_DIMS];
    memcpy(point, set->coverage->low, sizeof point);
    for (int j = 0; j < set->ncut; j++) {
        point[set->cut[j]] = corner_at(set, where, j);
    }
    return sum < 0 ? fail_hole(set->coverage, point, err) : fail_overlap(set->coverage, point, err);
}

/* Proves that the selected chunks cover the region exactly once. */
static fc_code prove(fc_coverage *c, fc_error *err) {
    corner_set set = {c, 0, {0}};
    set.ncut = cut_dimensions(c, set.cut);
    c->key = set.ncut ? set.cut[0] : c->tensor->ndim;
    if (set.ncut >= 24 || c->count + 1 > (size_t)MAX_CORNERS >> set.ncut) {
        return fc_fail(err, FC_EUNSUPPORTED, "tensor %s: %zu chunks cut along %d dimensions are not supported",
                       c->tensor->name, c->count, set.ncut);
    }
    uint32_t per_box = (uint32_t)1 << set.ncut;
    size_t n = (c->count + 1) * per_box;
    corner *corners = malloc(n * sizeof *corners);
    if (!corners) {
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", c->tensor->name);
    }
    for (size_t i = 0; i <= c->count; i++) {
        for (uint32_t mask = 0; mask < per_box; mask++) {
            corners[i * per_box + mask] = (corner){(uint32_t)i, mask};
        }
    }
    qsort_r(corners, n, sizeof *corners, compare_corners, &set);
    const corner *where = NULL;
    int64_t sum = first_imbalance(&set, corners, n, &where);
    fc_code rc = sum == 0 ? FC_OK : fail_imbalance(&set, where, sum, err);
    free(corners);
    return rc;
}

static fc_code index_reach(fc_coverage *c, fc_error *err) {
    if (c->key == c->tensor->ndim) {
        return FC_OK;
    }
    c->reach = malloc(c->count * sizeof *c->reach);
    if (!c->reach) {
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", c->tensor->name);
    }
    int64_t reach = INT64_MIN;
    for (size_t i = 0; i < c->count; i++) {
        int64_t end = clipped_high(c, c->chunks[i], c->key);
        reach = end > reach ? end : reach;
        c->reach[i] = reach;
    }
    return FC_OK;
}

fc_code fc_coverage_within(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                           fc_coverage **out, fc_error *err) {
    *out = NULL;
    static const int64_t origin[FC_MAX_DIMS];
    fc_box whole = {tensor->ndim, origin, tensor->shape};
    int64_t total;
    if (!fc_numel(tensor->ndim, tensor->shape, &total)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: the shape has more than 2^63 elements", tensor->name);
    }
    if (region && !fc_box_within(region, tensor->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: the box %s is outside the tensor", tensor->name,
                       fc_box_to_text(region).s);
    }
    fc_coverage *c = calloc(1, sizeof *c);
    if (!c) {
        return fc_fail(err, FC_ENOMEM, "tensor %s: out of memory", tensor->name);
    }
    c->checkpoint = checkpoint;
    c->tensor = tensor;
    region = region ? region : &whole;
    for (int d = 0; d < tensor->ndim; d++) {
        c->low[d] = region->offsets[d];
        c->high[d] = region->offsets[d] + region->sizes[d];
    }
    c->key = tensor->ndim;
    /* A region without elements needs no proof, but a chunk outside the shape is still an error. */
    fc_code rc = FC_OK;
    FC_TRY_GOTO(select_chunks(c, err), rc, fail);
    if (fc_box_volume(region) > 0) {
        FC_TRY_GOTO(prove(c, err), rc, fail);
    }
    FC_TRY_GOTO(index_reach(c, err), rc, fail);
    *out = c;
    return FC_OK;
fail:
    fc_coverage_free(c);
    return rc;
}

fc_code fc_coverage_new(const fc_tensor *tensor, fc_coverage **out, fc_error *err) {
    return fc_coverage_within(NULL, tensor, NULL, out, err);
}

void fc_coverage_free(fc_coverage *coverage) {
    if (coverage) {
        free(coverage->chunks);
        free(coverage->reach);
        free(coverage);
    }
}

/* @return the first position whose reach is beyond `low`, or, with `starts`, whose chunk starts at or after `low`. */
static size_t search(const fc_coverage *c, int64_t low, bool starts) {
    size_t begin = 0, end = c->count;
    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        bool found = starts ? clipped_low(c, c->chunks[middle], c->key) >= low : c->reach[middle] > low;
        if (found) {
            end = middle;
        } else {
            begin = middle + 1;
        }
    }
    return begin;
}

fc_code fc_coverage_visit(const fc_coverage *coverage, const fc_box *box,
                          fc_code (*visit)(void *context, const fc_overlap *overlap, fc_error *err), void *context,
                          fc_error *err) {
    size_t begin = 0, end = coverage->count;
    if (coverage->key < coverage->tensor->ndim) {
        /* All chunks have the same offsets in the dimensions before `key`, so the list is sorted along `key`. */
        begin = search(coverage, box->offsets[coverage->key], false);
        end = search(coverage, box->offsets[coverage->key] + box->sizes[coverage->key], true);
    }
    for (size_t i = begin; i < end; i++) {
        fc_overlap overlap;
        overlap.chunk = coverage->chunks[i];
        fc_box chunk = fc_chunk_box(coverage->tensor, &coverage->tensor->chunks[overlap.chunk]);
        if (!fc_box_intersect(&chunk, box, overlap.offsets, overlap.sizes)) {
            continue;
        }
        FC_TRY(visit(context, &overlap, err));
    }
    return FC_OK;
}
