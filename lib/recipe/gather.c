/*
 * Gathers blocks of a tensor from small boxes of its sources: see gather.h. It chooses the shape of blocks for which
 * it reads least: whole rows where columns are interleaved, and many rows of few columns where a matrix is transposed.
 */
#include "recipe/gather.h"

#include "base/checked.h"
#include "codec/strided.h"
#include "derived/derived.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "read/box.h"

#include <stdlib.h>
#include <string.h>

/*
 * Smaller boxes are gathered. A row of blocks is needed at once, so it has at most BAND bytes, which the cache of
 * decoded blocks holds. A system call costs as much as reading CALL bytes; a gap of up to GAP bytes is read, too.
 */
enum {
    SMALL_BOX = 2048,
    BLOCK = 480 << 10, /* fits the cache of the least memory */
    BAND = 16 << 20,
    MOST_BLOCKS = 1 << 22,
    LEAST_RUN = 128,
    CALL = 3 << 10,
    GAP = 4 << 10
};

/* @return whether the boxes of a part are large, and contiguous on both sides along the last dimension. */
static bool has_large_boxes(const fc_part *p, const fc_parted *t) {
    int64_t box = (int64_t)fc_dtype_size(t->dtype);
    bool contiguous = false;
    for (int a = 0; a < p->naxes; a++) {
        const fc_part_axis *x = &p->axes[a];
        box *= x->tstep == 1 ? x->size : 1; /* the others are walked index by index */
        contiguous =
            contiguous || (x->tdim == t->ndim - 1 && x->tstep == 1 && x->sdim == p->source->ndim - 1 && x->sstep == 1);
    }
    return contiguous && box >= SMALL_BOX;
}

bool fc_gather_pays(const fc_parted *t) {
    int64_t volume = 0;
    if (!fc_numel(t->ndim, t->shape, &volume) || volume <= SMALL_BOX) {
        return false; /* the whole tensor is small */
    }
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].source && !has_large_boxes(&t->parts[i], t)) {
            return true;
        }
    }
    return false;
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* The sizes of the smallest box of the source that contains what a block takes of a part. @return its number of
   elements that are used. */
static double hull_of(const fc_part *p, const int64_t *sizes, int64_t *hull) {
    double used = 1;
    for (int d = 0; d < FC_PART_DIMS; d++) {
        hull[d] = 1;
    }
    for (int a = 0; a < p->naxes; a++) {
        const fc_part_axis *x = &p->axes[a];
        const int64_t steps = least(x->size, sizes[x->tdim] / x->tstep), count = steps < 1 ? 1 : steps;
        hull[x->sdim] += (count - 1) * x->sstep;
        used *= (double)count;
    }
    return used;
}

/* Estimates what reading a part costs for one block, in elements per element of the block. */
static double cost_of_part(const fc_part *p, const int64_t *sizes, double element) {
    int64_t hull[FC_PART_DIMS];
    const double used = hull_of(p, sizes, hull);
    double run = 1, row = 1, reads = 1; /* elements that are contiguous, those from one run to the next, and the runs */
    bool whole = true;
    for (int d = p->source->ndim - 1; d >= 0; d--) {
        if (whole) {
            run *= (double)least(hull[d], p->source->shape[d]);
            row *= (double)p->source->shape[d];
        } else {
            reads *= (double)hull[d];
        }
        whole = whole && hull[d] >= p->source->shape[d];
    }
    const bool skips = (row - run) * element > GAP;
    return reads * (skips ? run + CALL / element : row) / used;
}

static double cost_of(const fc_parted *t, const int64_t *sizes) {
    double cost = 0;
    for (size_t i = 0; i < t->nparts; i++) {
        cost += t->parts[i].source ? cost_of_part(&t->parts[i], sizes, (double)fc_dtype_size(t->dtype)) : 0;
    }
    return cost;
}

/* Makes a block of `columns` of the last dimension, and as many of the others as fit. */
static void make_block(const fc_parted *t, int64_t columns, int64_t *sizes) {
    const int64_t element = (int64_t)fc_dtype_size(t->dtype), row = t->shape[t->ndim - 1];
    int64_t room = BLOCK / element;
    for (int d = t->ndim - 1; d >= 0; d--) {
        const int64_t most = d == t->ndim - 1 ? least(room, columns) : least(room, BAND / element / row);
        sizes[d] = least(t->shape[d], most < 1 ? 1 : most);
        room /= sizes[d];
    }
}

/* Chooses the sizes of blocks: whole rows, or fewer and fewer columns. */
static void block_sizes(const fc_parted *t, int64_t *sizes) {
    const int64_t element = (int64_t)fc_dtype_size(t->dtype);
    int64_t tried[FC_PART_DIMS];
    make_block(t, t->shape[t->ndim - 1], sizes);
    double best = cost_of(t, sizes);
    for (int64_t columns = sizes[t->ndim - 1] / 2; columns * element >= LEAST_RUN; columns /= 2) {
        make_block(t, columns, tried);
        const double cost = cost_of(t, tried);
        if (cost < best) {
            best = cost;
            memcpy(sizes, tried, (size_t)t->ndim * sizeof *sizes);
        }
    }
}

fc_code fc_gather_new(const fc_parted *t, fc_arena *arena, fc_tensor *out, fc_gathered **gathered, fc_error *err) {
    int64_t sizes[FC_PART_DIMS], count = 1;
    block_sizes(t, sizes);
    for (int d = 0; d < t->ndim; d++) {
        if (!fc_mul_i64(count, (t->shape[d] - 1) / sizes[d] + 1, &count) || count > MOST_BLOCKS) {
            return fc_fail(err, FC_EUNSUPPORTED, "it would be gathered from more than %d blocks", MOST_BLOCKS);
        }
    }
    FC_TRY(
        fc_list_budget_take(t->budget, (uint64_t)count, sizeof(fc_chunk) + 2 * (size_t)t->ndim * sizeof(int64_t), err));
    FC_TRY(fc_list_budget_take(t->budget, t->nparts, sizeof(fc_part), err));
    fc_gathered *g = fc_arena_calloc(arena, 1, sizeof *g);
    fc_part *parts = fc_arena_copy(arena, t->parts, t->nparts, sizeof *parts);
    FC_NEED(g && parts && fc_derived_cut(out, sizes, (size_t)count, arena), err, NULL);
    g->parted = *t;
    g->parted.parts = parts;
    g->parted.budget = NULL; /* blocks are read by many threads, and are small */
    *gathered = g;
    return FC_OK;
}

/* Finds the parts of the tensor that lie in a block. */
static fc_code block_of(const fc_parted *t, const fc_box *box, fc_parted *out, fc_error *err) {
    fc_parted now = *t;
    now.capacity = 0; /* its parts belong to the arena */
    for (int d = 0; d < t->ndim; d++) {
        fc_parted less;
        fc_code rc = fc_parted_slice(&now, d, box->offsets[d], box->offsets[d] + box->sizes[d], false, &less, err);
        if (d > 0) {
            fc_parted_free(&now);
        }
        now = less;
        if (rc != FC_OK) {
            fc_parted_free(&now);
            return rc;
        }
    }
    *out = now;
    return FC_OK;
}

/* Reads the smallest box of the source that contains a part, and copies its elements into the block. */
static fc_code copy_part(const fc_checkpoint *source, const fc_part *p, const fc_box *box, fc_dtype dtype,
                         fc_source_crc *crc, unsigned char *buf, fc_error *err) {
    int64_t offsets[FC_PART_DIMS], sizes[FC_PART_DIMS], from[FC_PART_DIMS], to[FC_PART_DIMS];
    int64_t lengths[FC_PART_AXES], src[FC_PART_AXES], dst[FC_PART_AXES], at = 0;
    const size_t element = fc_dtype_size(dtype);
    fc_strided copy;
    fc_part_hull(p, offsets, sizes);
    const fc_box hull = {p->source->ndim, offsets, sizes};
    unsigned char *read = malloc((size_t)fc_box_volume(&hull) * element);
    if (!read || !fc_row_major_strides(hull.ndim, sizes, from) || !fc_row_major_strides(box->ndim, box->sizes, to)) {
        free(read);
        return fc_no_memory(err, NULL);
    }
    for (int a = 0; a < p->naxes; a++) {
        lengths[a] = p->axes[a].size;
        src[a] = from[p->axes[a].sdim] * p->axes[a].sstep;
        dst[a] = to[p->axes[a].tdim] * p->axes[a].tstep;
    }
    for (int d = 0; d < box->ndim; d++) {
        at += p->tbase[d] * to[d];
    }
    fc_code rc = fc_read_box_crc(source, p->source, &hull, dtype, read, crc, err);
    if (rc == FC_OK && fc_strided_make(&copy, p->naxes, lengths, src, dst, (int64_t)element)) {
        fc_strided_copy(&copy, read, buf + (size_t)at * element);
    }
    free(read);
    return rc;
}

fc_code fc_gather_read(const fc_checkpoint *source, const fc_tensor *tensor, const fc_gathered *g, size_t index,
                       fc_source_crc *crc, unsigned char *buf, fc_error *err) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[index]);
    fc_parted block;
    FC_TRY(block_of(&g->parted, &box, &block, err));
    fc_code rc = FC_OK;
    for (size_t i = 0; i < block.nparts; i++) {
        if (!block.parts[i].source) { /* padding */
            memset(buf, 0, (size_t)fc_chunk_data_bytes(tensor, &tensor->chunks[index]));
            break;
        }
    }
    for (size_t i = 0; rc == FC_OK && i < block.nparts; i++) {
        if (block.parts[i].source) {
            rc = copy_part(source, &block.parts[i], &box, tensor->dtype, crc, buf, err);
        }
    }
    fc_parted_free(&block);
    return rc;
}
