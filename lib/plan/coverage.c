/*
 * Coverage: finds the chunks of a tensor that overlap a box, and proves that they cover it exactly once. The result is
 * a sorted list of chunks that the engine searches for every tile.
 *
 * The proof works for boxes of any shape without comparing pairs. Each bound x along each dimension d gets a secret
 * random number S(d, x) modulo the prime 2^61 - 1. The weight of a box is the product over d of S(d, end) - S(d,
 * start). Weights add up: the weight of a box is the sum of the weights of the cells into which any hyperplanes divide
 * it. So the weights of chunks that cover the region exactly once add up to the weight of the region. If they do not
 * cover it exactly once, the difference is a polynomial in the random numbers that is not zero: every cell contributes
 * a product of its own. A random point is a root of it with a probability of about ndim / 2^61. The numbers are a hash
 * of 16 random bytes of the process, so the author of a file does not know them. The time is that of reading the
 * chunks, whatever the number of dimensions.
 *
 * When the weights differ, bisection along each dimension in turn finds the first element, in lexicographic order, that
 * is not covered exactly once.
 */
#include "fsdpckpt/plan.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

enum { MAX_STEPS = 64 }; /* of a bisection: an int64_t has no more bits */

#define PRIME ((UINT64_C(1) << 61) - 1)

struct fc_coverage {
    const fc_checkpoint *checkpoint; /* for messages; may be NULL */
    const fc_tensor *tensor;
    int64_t low[FC_MAX_DIMS], high[FC_MAX_DIMS]; /* the region */
    size_t *chunks; /* the chunks that overlap the region, in the order of compare_chunks, without replicas */
    size_t count;
    int key;        /* the first dimension along which chunks divide the region; ndim when there is none */
    int64_t *reach; /* reach[i]: the largest end along `key` of chunks[0 … i] */
    uint64_t secret[2];
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

/* The first dimension along which some chunk does not span the region; ndim when there is none. */
static int first_cut(const fc_coverage *c) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        for (size_t i = 0; i < c->count; i++) {
            if (clipped_low(c, c->chunks[i], d) != c->low[d] || clipped_high(c, c->chunks[i], d) != c->high[d]) {
                return d;
            }
        }
    }
    return c->tensor->ndim;
}

/* The kernel gives each process 16 random bytes. */
static void make_secret(fc_coverage *c) {
    const void *random = (const void *)getauxval(AT_RANDOM); /* NOLINT(performance-no-int-to-ptr) */
    if (random) {
        memcpy(c->secret, random, sizeof c->secret);
    }
}

/* The finisher of SplitMix64: every bit of the result depends on every bit of `x`. */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* S(d, x) */
static uint64_t random_number(const fc_coverage *c, int d, int64_t x) {
    return mix(mix((uint64_t)x + c->secret[0]) ^ mix((uint64_t)d + c->secret[1])) % PRIME;
}

static uint64_t weight_along(const fc_coverage *c, int d, int64_t start, int64_t end) {
    return (random_number(c, d, end) + PRIME - random_number(c, d, start)) % PRIME;
}

static uint64_t multiply(uint64_t a, uint64_t b) {
    return (uint64_t)((unsigned __int128)a * b % PRIME);
}

/* The weight of the part of a chunk that lies between `low` and `high`. */
static uint64_t weight_of_chunk(const fc_coverage *c, size_t chunk, const int64_t *low, const int64_t *high) {
    uint64_t weight = 1;
    for (int d = 0; d < c->tensor->ndim; d++) {
        int64_t start = clipped_low(c, chunk, d), end = clipped_high(c, chunk, d);
        start = start > low[d] ? start : low[d];
        end = end < high[d] ? end : high[d];
        if (start >= end) {
            return 0;
        }
        weight = multiply(weight, weight_along(c, d, start, end));
    }
    return weight;
}

/* Whether the selected chunks cover the box from `low` to `high` exactly once. */
static bool cover_once(const fc_coverage *c, const int64_t *low, const int64_t *high) {
    uint64_t sum = 0, whole = 1;
    for (size_t i = 0; i < c->count; i++) {
        sum = (sum + weight_of_chunk(c, c->chunks[i], low, high)) % PRIME;
    }
    for (int d = 0; d < c->tensor->ndim; d++) {
        whole = multiply(whole, weight_along(c, d, low[d], high[d]));
    }
    return sum == whole;
}

/* Finds the first element that is not covered exactly once, in a region where there is one. */
static void find_first_wrong(const fc_coverage *c, int64_t *point) {
    int64_t low[FC_MAX_DIMS], high[FC_MAX_DIMS];
    memcpy(low, c->low, sizeof low);
    memcpy(high, c->high, sizeof high);
    for (int d = 0; d < c->tensor->ndim; d++) {
        for (int step = 0; step < MAX_STEPS && high[d] - low[d] > 1; step++) {
            int64_t end = high[d], middle = low[d] + (end - low[d]) / 2;
            high[d] = middle;
            if (cover_once(c, low, high)) {
                low[d] = middle;
                high[d] = end;
            }
        }
    }
    memcpy(point, low, sizeof low);
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

/* Proves that the selected chunks cover the region exactly once. */
static fc_code prove(const fc_coverage *c, fc_error *err) {
    if (cover_once(c, c->low, c->high)) {
        return FC_OK;
    }
    int64_t point[FC_MAX_DIMS];
    find_first_wrong(c, point);
    for (size_t i = 0; i < c->count; i++) {
        if (chunk_holds(c, c->chunks[i], point)) {
            return fail_overlap(c, point, err);
        }
    }
    return fail_hole(c, point, err);
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
    make_secret(c);
    /* A region without elements needs no proof, but a chunk outside the shape is still an error. */
    fc_code rc = FC_OK;
    FC_TRY_GOTO(select_chunks(c, err), rc, fail);
    c->key = first_cut(c);
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
