/*
 * Finds the boxes of a parameter in a flat parameter. Each shard is a run of row-major elements of some parameters, and
 * a run is a few boxes (sharding/flat_runs.h). Nothing is read: a box becomes a chunk that refers to the extent of its
 * shard at another offset and with other strides.
 */
#include "flat/flat_boxes.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "sharding/flat_runs.h"

#include <stdlib.h>

/* The boxes of a parameter that were found so far. */
typedef struct boxes {
    fc_chunk *chunks; /* NULL: the boxes are only counted */
    fc_flat_position *positions;
    int64_t *dims;
    size_t count;
} boxes;

/* Adds the boxes of the run of `p` that a chunk of the flat parameter contains. */
static void add_run(const fc_tensor *flat, size_t chunk, const fc_flat_param *p, boxes *out) {
    const fc_chunk *c = &flat->chunks[chunk];
    int64_t first = c->dims[0] - p->offset, last = first + c->dims[1], start;
    int64_t dims[2 * FC_MAX_DIMS];
    fc_flat_run run;
    first = first > 0 ? first : 0;
    last = last < p->numel ? last : p->numel;
    if (first >= last || !fc_flat_run_start(&run, p->ndim, p->shape, first, last)) {
        return;
    }
    for (; fc_flat_run_next(&run, dims, &start); out->count++) {
        if (!out->chunks) {
            continue;
        }
        int64_t *own = out->dims + 2 * (size_t)p->ndim * out->count;
        for (int d = 0; d < 2 * p->ndim; d++) {
            own[d] = dims[d];
        }
        out->chunks[out->count] = *c;
        out->chunks[out->count].dims = own;
        out->positions[out->count] = (fc_flat_position){chunk, p->offset + start - c->dims[0]};
    }
}

/* @return the first chunk, in the order of offsets, that ends after element `at`. */
static size_t first_chunk(const fc_tensor *flat, const size_t *order, int64_t at) {
    size_t low = 0;
    FC_BISECT(low, flat->nchunks, mid, flat->chunks[order[mid]].dims[0] + flat->chunks[order[mid]].dims[1] <= at);
    return low;
}

static void find_boxes(const fc_tensor *flat, const size_t *order, const fc_flat_param *p, boxes *out) {
    for (size_t i = first_chunk(flat, order, p->offset);
         i < flat->nchunks && flat->chunks[order[i]].dims[0] < p->offset + p->numel; i++) {
        add_run(flat, order[i], p, out);
    }
}

static bool copy_shape(const fc_flat_param *p, fc_arena *arena, fc_tensor *t) {
    int64_t *shape = fc_arena_calloc(arena, (size_t)p->ndim, sizeof *shape);
    for (int d = 0; shape && d < p->ndim; d++) {
        shape[d] = p->shape[d];
    }
    t->ndim = p->ndim;
    t->shape = shape;
    return shape != NULL;
}

fc_code fc_flat_boxes(const fc_tensor *flat, const size_t *order, const fc_flat_param *p, fc_arena *arena,
                      fc_tensor *out, const fc_flat_position **positions, fc_error *err) {
    boxes made = {0};
    *out = (fc_tensor){.dtype = flat->dtype};
    FC_NEED(copy_shape(p, arena, out), err, flat->name);
    find_boxes(flat, order, p, &made);
    out->nchunks = made.count;
    made = (boxes){.chunks = fc_arena_calloc(arena, out->nchunks + 1, sizeof *made.chunks),
                   .positions = fc_arena_calloc(arena, out->nchunks + 1, sizeof *made.positions),
                   .dims = fc_arena_calloc(arena, out->nchunks + 1, 2 * (size_t)p->ndim * sizeof *made.dims)};
    FC_NEED(made.chunks && made.positions && made.dims, err, flat->name);
    find_boxes(flat, order, p, &made);
    *positions = made.positions;
    out->chunks = made.chunks;
    return FC_OK;
}

typedef struct ordered {
    int64_t start;
    size_t chunk;
} ordered;

static int compare_chunk_starts(const void *a, const void *b) {
    const ordered *x = a, *y = b;
    FC_ORDER_BY(x->start, y->start);
    return FC_ORDER(x->chunk, y->chunk);
}

size_t *fc_flat_order_chunks(const fc_tensor *flat, fc_arena *arena) {
    ordered *sorted = fc_arena_calloc(arena, flat->nchunks + 1, sizeof *sorted);
    size_t *order = fc_arena_calloc(arena, flat->nchunks + 1, sizeof *order);
    if (!sorted || !order) {
        return NULL;
    }
    for (size_t i = 0; i < flat->nchunks; i++) {
        sorted[i] = (ordered){flat->chunks[i].dims[0], i};
    }
    fc_sort_items(sorted, flat->nchunks, sizeof *sorted, compare_chunk_starts);
    for (size_t i = 0; i < flat->nchunks; i++) {
        order[i] = sorted[i].chunk;
    }
    return order;
}
