/*
 * Recognises how a tensor is sharded: a grid from the chunks of the manifest, and placements from their ranks. See
 * sharding.h.
 */
#include "fsdpckpt/sharding.h"

#include "fsdpckpt/order.h"

#include <stdlib.h>
#include <string.h>

void fc_sharding_scratch_free(fc_sharding_scratch *scratch) {
    free(scratch->values);
    free(scratch->cells);
    memset(scratch, 0, sizeof *scratch);
}

static bool reserve(fc_sharding_scratch *scratch, size_t chunks, int ndim) {
    size_t need;
    if (__builtin_mul_overflow(chunks, (size_t)(ndim ? ndim : 1), &need)) {
        return false;
    }
    if (need > scratch->capacity) {
        free(scratch->values);
        free(scratch->cells);
        scratch->values = calloc(need, sizeof *scratch->values);
        scratch->cells = calloc(need, sizeof *scratch->cells);
        scratch->capacity = scratch->values && scratch->cells ? need : 0;
    }
    return scratch->capacity >= need && need > 0;
}

/* Whether the chunk starts at 0 in every dimension but `d`. */
static bool on_axis(const fc_tensor *t, const fc_chunk *chunk, int d) {
    for (int e = 0; e < t->ndim; e++) {
        if (e != d && chunk->dims[e] != 0) {
            return false;
        }
    }
    return true;
}

/* Stores the distinct offsets of the chunks on the axis of dimension `d` in `values`, sorted. @return their number. */
static size_t find_axis(const fc_tensor *t, int d, int64_t *values) {
    size_t n = 0, distinct = 0;
    bool sorted = true;
    for (size_t i = 0; i < t->nchunks; i++) {
        if (on_axis(t, &t->chunks[i], d)) {
            values[n] = t->chunks[i].dims[d];
            sorted = sorted && (n == 0 || values[n - 1] <= values[n]);
            n++;
        }
    }
    if (!sorted) {
        fc_sort_items(values, n, sizeof *values, fc_order_numbers);
    }
    for (size_t i = 0; i < n; i++) {
        if (distinct == 0 || values[distinct - 1] != values[i]) {
            values[distinct++] = values[i];
        }
    }
    return distinct;
}

static bool find_position(const int64_t *values, size_t n, int64_t value, size_t *at) {
    size_t low = 0;
    FC_BISECT(low, n, middle, values[middle] < value);
    *at = low;
    return low < n && values[low] == value;
}

/* Finds the cell of a chunk. @return false when the chunk is not exactly one cell of the grid. */
static bool find_cell(const fc_tensor *t, const fc_sharding *c, const fc_sharding_scratch *s, const fc_chunk *chunk,
                      size_t *cell) {
    *cell = 0;
    for (int d = 0; d < t->ndim; d++) {
        size_t at, count = (size_t)c->counts[d];
        if (!find_position(s->axis[d], count, chunk->dims[d], &at)) {
            return false;
        }
        int64_t end = at + 1 < count ? s->axis[d][at + 1] : t->shape[d];
        if (chunk->dims[t->ndim + d] != end - chunk->dims[d]) {
            return false;
        }
        *cell = *cell * count + at;
    }
    return true;
}

/* Fills scratch->cells. @return false when the chunks do not fill the grid evenly. */
static bool fill_cells(const fc_tensor *t, fc_sharding *c, fc_sharding_scratch *s) {
    size_t filled = 0;
    memset(s->cells, 0, s->ncells * sizeof *s->cells);
    for (size_t i = 0; i < t->nchunks; i++) {
        size_t cell;
        if (!find_cell(t, c, s, &t->chunks[i], &cell)) {
            return false;
        }
        if (s->cells[cell] == 0) {
            s->cells[cell] = (uint32_t)(i < UINT32_MAX - 1 ? i + 1 : UINT32_MAX);
            filled++;
        }
    }
    c->copies = t->nchunks / s->ncells;
    return filled == s->ncells && t->nchunks % s->ncells == 0;
}

static bool find_grid(const fc_tensor *t, fc_sharding_scratch *s, fc_sharding *c) {
    size_t cells = 1;
    int64_t *values = s->values;
    for (int d = 0; d < t->ndim; d++) {
        size_t n = find_axis(t, d, values);
        s->axis[d] = values;
        values += n;
        c->counts[d] = (int64_t)n;
        if (n == 0 || __builtin_mul_overflow(cells, n, &cells) || cells > t->nchunks) {
            return false;
        }
    }
    s->ncells = cells;
    return fill_cells(t, c, s);
}

/* Whether the ranks wrote the cells in order: row-major over the grid or, with `strided`, tp-major over dp × tp. */
static bool ranks_match(const fc_tensor *t, const fc_sharding_scratch *s, size_t dp, size_t tp, bool strided) {
    for (size_t cell = 0; cell < s->ncells; cell++) {
        size_t rank = strided ? cell % dp * tp + cell / dp : cell;
        if (t->chunks[s->cells[cell] - 1].rank != rank) {
            return false;
        }
    }
    return true;
}

static fc_placement shard(int dim) {
    fc_placement p = {FC_SHARD, dim, 0};
    return p;
}

static void set_mesh(fc_sharding *c, int ndim, size_t a, fc_placement first, size_t b, fc_placement second) {
    c->placed = true;
    c->mesh_ndim = ndim;
    c->mesh[0] = (int64_t)a;
    c->mesh[1] = (int64_t)b;
    c->placements[0] = first;
    c->placements[1] = second;
}

/* Finds placements that explain the order of the ranks: Shard on one axis, two Shards, or FSDP over a dimension that TP
   sharded first. */
static void find_placements(const fc_tensor *t, const fc_sharding_scratch *s, fc_sharding *c) {
    size_t n = s->ncells;
    if (c->copies != 1 || n < 2 || c->nsharded < 1 || c->nsharded > 2) {
        return;
    }
    if (c->nsharded == 2) {
        size_t a = (size_t)c->counts[c->dims[0]], b = (size_t)c->counts[c->dims[1]];
        if (ranks_match(t, s, n, 1, false)) {
            set_mesh(c, 2, a, shard(c->dims[0]), b, shard(c->dims[1]));
        }
        return;
    }
    if (ranks_match(t, s, n, 1, false)) {
        set_mesh(c, 1, n, shard(c->dims[0]), 1, shard(0));
        return;
    }
    /* In tp-major order, rank 1 wrote cell number dp. */
    for (size_t dp = 2; dp < n; dp++) {
        if (t->chunks[s->cells[dp] - 1].rank == 1) {
            if (n % dp == 0 && ranks_match(t, s, dp, n / dp, true)) {
                fc_placement strided = {FC_STRIDED_SHARD, c->dims[0], (int64_t)(n / dp)};
                set_mesh(c, 2, dp, strided, n / dp, shard(c->dims[0]));
            }
            return;
        }
    }
}

bool fc_recognise_sharding(const fc_tensor *tensor, fc_sharding_scratch *scratch, fc_sharding *out) {
    memset(out, 0, sizeof *out);
    for (int d = 0; d < tensor->ndim; d++) {
        out->counts[d] = 1;
    }
    scratch->ncells = 0;
    if (tensor->nchunks == 0) {
        return true;
    }
    if (!reserve(scratch, tensor->nchunks, tensor->ndim)) {
        return false;
    }
    out->grid = find_grid(tensor, scratch, out);
    if (!out->grid) {
        for (int d = 0; d < tensor->ndim; d++) {
            out->counts[d] = 1;
        }
        return true;
    }
    for (int d = 0; d < tensor->ndim; d++) {
        if (out->counts[d] > 1 && out->nsharded++ < 2) {
            out->dims[out->nsharded - 1] = d;
        }
    }
    find_placements(tensor, scratch, out);
    return true;
}
