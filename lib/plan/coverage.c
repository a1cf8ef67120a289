/*
 * Coverage: finds the chunks of a tensor that overlap a box, and proves that they cover it exactly once. The result is
 * a sorted list of chunks, and a tree of boxes around them that the engine searches for every tile.
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
#include "plan/coverage.h"
#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/box_text.h"
#include "plan/coverage_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

enum {
    MAX_STEPS = 64, /* of a bisection: an int64_t has no more bits */
    LEAF = 8        /* chunks that are looked at one after the other */
};

#define PRIME ((UINT64_C(1) << 61) - 1)

/* Sorts by clipped offsets, the order in which the region is walked. Then by whole boxes, so that replicas become
   neighbours, then by index, so that the first replica leads. */
static int compare_chunks(const void *pa, const void *pb, void *context) {
    const fc_coverage *c = context;
    size_t a = *(const size_t *)pa, b = *(const size_t *)pb;
    int ndim = c->tensor->ndim;
    for (int d = 0; d < ndim; d++) {
        const int64_t x = fc_clipped_low(c, a, d), y = fc_clipped_low(c, b, d);
        FC_ORDER_BY(x, y);
    }
    const int order = fc_order_row(c->tensor->chunks[a].dims, c->tensor->chunks[b].dims, 2 * (size_t)ndim);
    return order ? order : FC_ORDER(a, b);
}

static bool same_box(const fc_tensor *tensor, size_t a, size_t b) {
    fc_box box_a = fc_chunk_box(tensor, &tensor->chunks[a]), box_b = fc_chunk_box(tensor, &tensor->chunks[b]);
    return fc_box_equal(&box_a, &box_b);
}

static bool meets_region(const fc_coverage *c, size_t chunk) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        if (fc_clipped_low(c, chunk, d) >= fc_clipped_high(c, chunk, d)) {
            return false;
        }
    }
    return true;
}

/* Lists the chunks that overlap the region, sorted and without replicas. */
static fc_code select_chunks(fc_coverage *c, fc_error *err) {
    const fc_tensor *tensor = c->tensor;
    size_t bytes;
    FC_NEED(fc_mul_size(tensor->nchunks, sizeof *c->chunks, &bytes), err, tensor->name);
    c->chunks = malloc(bytes ? bytes : 1);
    FC_NEED(c->chunks, err, tensor->name);
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
    fc_sort_items_by(c->chunks, c->count, sizeof *c->chunks, compare_chunks, c);
    size_t kept = 0;
    for (size_t i = 0; i < c->count; i++) {
        if (kept == 0 || !same_box(tensor, c->chunks[kept - 1], c->chunks[i])) {
            c->chunks[kept++] = c->chunks[i];
        }
    }
    c->count = kept;
    return FC_OK;
}

/* Adds a chunk to the selected ones. The capacity is the next power of two. */
static fc_code add_chunk(void *context, const fc_overlap *overlap, fc_error *err) {
    fc_coverage *c = context;
    if ((c->count & (c->count - 1)) == 0) {
        const size_t capacity = c->count ? 2 * c->count : 1;
        size_t bytes, *grown = NULL;
        grown = fc_mul_size(capacity, sizeof *grown, &bytes) ? realloc(c->chunks, bytes) : NULL;
        FC_NEED(grown, err, c->tensor->name);
        c->chunks = grown;
    }
    c->chunks[c->count++] = overlap->chunk;
    return FC_OK;
}

/* Lists the chunks of `list` that overlap the region, sorted. */
static fc_code select_from(fc_coverage *c, const fc_coverage *list, fc_error *err) {
    int64_t sizes[FC_MAX_DIMS];
    for (int d = 0; d < c->tensor->ndim; d++) {
        sizes[d] = c->high[d] - c->low[d];
    }
    const fc_box region = {c->tensor->ndim, c->low, sizes};
    FC_TRY(fc_coverage_visit(list, &region, add_chunk, c, err));
    fc_sort_items_by(c->chunks, c->count, sizeof *c->chunks, compare_chunks, c);
    return FC_OK;
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
        int64_t start = fc_clipped_low(c, chunk, d), end = fc_clipped_high(c, chunk, d);
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

/* Proves that the selected chunks cover the region exactly once. */
static fc_code prove(const fc_coverage *c, fc_error *err) {
    if (cover_once(c, c->low, c->high)) {
        return FC_OK;
    }
    int64_t point[FC_MAX_DIMS];
    find_first_wrong(c, point);
    for (size_t i = 0; i < c->count; i++) {
        if (fc_coverage_chunk_holds(c, c->chunks[i], point)) {
            return fc_coverage_fail_overlap(c, point, err);
        }
    }
    return fc_coverage_fail_hole(c, point, err);
}

/* A node of the tree: chunks `begin` to `end`, exclusive. The two halves of its run are its children. */
typedef struct node {
    size_t index, begin, end;
} node;

static node root_of(const fc_coverage *c) {
    return (node){1, 0, c->count};
}

static bool is_leaf(node n) {
    return n.end - n.begin <= LEAF;
}

static node child_of(node n, int second) {
    const size_t middle = n.begin + (n.end - n.begin) / 2;
    return second ? (node){2 * n.index + 1, middle, n.end} : (node){2 * n.index, n.begin, middle};
}

static int64_t *bounds_of(const fc_coverage *c, node n) {
    return c->bounds + 2 * (size_t)c->tensor->ndim * n.index;
}

static void include(int64_t *bounds, int ndim, int d, int64_t low, int64_t high) {
    bounds[d] = low < bounds[d] ? low : bounds[d];
    bounds[ndim + d] = high > bounds[ndim + d] ? high : bounds[ndim + d];
}

/* The recursion is as deep as the logarithm of the number of chunks. */
static void set_bounds(const fc_coverage *c, node n) { /* NOLINT(misc-no-recursion) */
    const int ndim = c->tensor->ndim;
    int64_t *bounds = bounds_of(c, n);
    for (int d = 0; d < ndim; d++) {
        bounds[d] = INT64_MAX;
        bounds[ndim + d] = INT64_MIN;
    }
    for (size_t i = n.begin; i < n.end && is_leaf(n); i++) {
        const int64_t *dims = c->tensor->chunks[c->chunks[i]].dims;
        for (int d = 0; d < ndim; d++) {
            include(bounds, ndim, d, dims[d], dims[d] + dims[ndim + d]);
        }
    }
    for (int second = 0; second < 2 && !is_leaf(n); second++) {
        const node child = child_of(n, second);
        const int64_t *inner = bounds_of(c, child);
        set_bounds(c, child);
        for (int d = 0; d < ndim; d++) {
            include(bounds, ndim, d, inner[d], inner[ndim + d]);
        }
    }
}

static fc_code make_tree(fc_coverage *c, fc_error *err) {
    size_t nodes = 2;
    for (size_t run = c->count; run > LEAF; run = (run + 1) / 2) {
        nodes *= 2;
    }
    if (nodes == 2) {
        return FC_OK;
    }
    c->bounds = calloc(nodes, 2 * (size_t)c->tensor->ndim * sizeof *c->bounds);
    FC_NEED(c->bounds, err, c->tensor->name);
    set_bounds(c, root_of(c));
    return FC_OK;
}

/* Makes a coverage of a region that has no chunks yet. */
static fc_code begin_coverage(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                              fc_coverage **out, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box whole = {tensor->ndim, origin, tensor->shape};
    int64_t total;
    *out = NULL;
    if (!fc_numel(tensor->ndim, tensor->shape, &total)) {
        return fc_fail(err, FC_ECORRUPT, "tensor %s: the shape has more than 2^63 elements", tensor->name);
    }
    if (region && !fc_box_within(region, tensor->shape)) {
        return fc_fail(err, FC_EUSAGE, "tensor %s: the box %s is outside the tensor", tensor->name,
                       fc_box_to_text(region).s);
    }
    fc_coverage *c = calloc(1, sizeof *c);
    FC_NEED(c, err, tensor->name);
    c->checkpoint = checkpoint;
    c->tensor = tensor;
    region = region ? region : &whole;
    for (int d = 0; d < tensor->ndim; d++) {
        c->low[d] = region->offsets[d];
        c->high[d] = region->offsets[d] + region->sizes[d];
    }
    make_secret(c);
    *out = c;
    return FC_OK;
}

static bool has_elements(const fc_coverage *c) {
    for (int d = 0; d < c->tensor->ndim; d++) {
        if (c->low[d] == c->high[d]) {
            return false;
        }
    }
    return true;
}

/* Selects chunks, or those of `index`, and proves the region if `proved`. */
static fc_code fill_coverage(fc_coverage *c, const fc_coverage *index, bool proved, fc_error *err) {
    FC_TRY(index ? select_from(c, index, err) : select_chunks(c, err));
    /* A region without elements needs no proof, but a chunk outside the shape is still an error. */
    FC_TRY(proved && has_elements(c) ? prove(c, err) : FC_OK);
    return make_tree(c, err);
}

static fc_code make_coverage(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                             const fc_coverage *index, bool proved, fc_coverage **out, fc_error *err) {
    FC_TRY(begin_coverage(checkpoint, tensor, region, out, err));
    fc_code rc = fill_coverage(*out, index, proved, err);
    if (rc != FC_OK) {
        fc_coverage_free(*out);
        *out = NULL;
    }
    return rc;
}

fc_code fc_coverage_within(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *region,
                           fc_coverage **out, fc_error *err) {
    return make_coverage(checkpoint, tensor, region, NULL, true, out, err);
}

fc_code fc_coverage_list(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_coverage **out, fc_error *err) {
    return make_coverage(checkpoint, tensor, NULL, NULL, false, out, err);
}

fc_code fc_coverage_part(const fc_coverage *list, const fc_box *region, fc_coverage **out, fc_error *err) {
    return make_coverage(list->checkpoint, list->tensor, region, list, true, out, err);
}

fc_code fc_coverage_new(const fc_tensor *tensor, fc_coverage **out, fc_error *err) {
    return fc_coverage_within(NULL, tensor, NULL, out, err);
}

size_t fc_coverage_count(const fc_coverage *coverage) {
    return coverage->count;
}

size_t fc_coverage_chunk(const fc_coverage *coverage, size_t position) {
    return coverage->chunks[position];
}

void fc_coverage_free(fc_coverage *coverage) {
    if (coverage) {
        free(coverage->chunks);
        free(coverage->bounds);
        free(coverage);
    }
}

/* What fc_coverage_visit is called with. */
typedef struct visitor {
    const fc_coverage *coverage;
    const fc_box *box;
    fc_code (*visit)(void *context, const fc_overlap *overlap, fc_error *err);
    void *context;
} visitor;

static bool meets_box(const visitor *v, node n) {
    const int ndim = v->box->ndim;
    const int64_t *bounds = v->coverage->bounds ? bounds_of(v->coverage, n) : NULL;
    for (int d = 0; d < ndim && bounds; d++) {
        if (bounds[d] >= v->box->offsets[d] + v->box->sizes[d] || bounds[ndim + d] <= v->box->offsets[d]) {
            return false;
        }
    }
    return true;
}

static fc_code visit_leaf(const visitor *v, node n, fc_error *err) {
    const fc_coverage *c = v->coverage;
    for (size_t i = n.begin; i < n.end; i++) {
        fc_overlap overlap = {.chunk = c->chunks[i]};
        const fc_box chunk = fc_chunk_box(c->tensor, &c->tensor->chunks[overlap.chunk]);
        if (fc_box_intersect(&chunk, v->box, overlap.offsets, overlap.sizes)) {
            FC_TRY(v->visit(v->context, &overlap, err));
        }
    }
    return FC_OK;
}

/* The recursion is as deep as the logarithm of the number of chunks. */
static fc_code visit_node(const visitor *v, node n, fc_error *err) { /* NOLINT(misc-no-recursion) */
    if (!meets_box(v, n)) {
        return FC_OK;
    }
    if (is_leaf(n)) {
        return visit_leaf(v, n, err);
    }
    FC_TRY(visit_node(v, child_of(n, 0), err));
    return visit_node(v, child_of(n, 1), err);
}

fc_code fc_coverage_visit(const fc_coverage *coverage, const fc_box *box,
                          fc_code (*visit)(void *context, const fc_overlap *overlap, fc_error *err), void *context,
                          fc_error *err) {
    const visitor v = {coverage, box, visit, context};
    return visit_node(&v, root_of(coverage), err);
}
