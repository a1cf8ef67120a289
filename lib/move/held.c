/*
 * Writes target files from a source in the memory of several ranks. See held.h. The part of an item that one chunk
 * covers is divided into boxes that are contiguous in the item. The engine moves them as items of a file of their own,
 * and their CRCs are shifted to their places in the item.
 */
#include "move/held.h"

#include "base/crc.h"
#include "base/grow.h"
#include "checkpoint/memory_data.h"
#include "fsdpckpt/try.h"
#include "move/file.h"
#include "ranks/exchange.h"

#include <stdlib.h>

/* ---- which rank moves a chunk ---- */

static size_t count_chunks(const fc_checkpoint *source) {
    size_t count = 0;
    for (size_t i = 0; i < source->ntensors; i++) {
        count += source->tensors[i].nchunks;
    }
    return count;
}

/* Finds the first tensor with a chunk that no rank holds. */
static fc_code check_movers(const fc_conversion *m, fc_error *err) {
    const fc_checkpoint *source = m->target->source;
    const uint64_t *mover = m->movers;
    for (size_t i = 0; i < source->ntensors; i++) {
        for (size_t k = 0; k < source->tensors[i].nchunks; k++) {
            if (*mover++ >= (uint64_t)m->comm->size) {
                return fc_fail(err, FC_EUSAGE, "%s: tensor %s: no rank has the data of chunk %zu", source->path,
                               source->tensors[i].name, k);
            }
        }
    }
    return FC_OK;
}

/* Several ranks may hold a chunk. The smallest number wins, and the numbers rotate from chunk to chunk, so that all
 * ranks move about the same amount. */
fc_code fc_held_choose(fc_conversion *m, fc_error *err) {
    const fc_checkpoint *source = m->target->source;
    const uint64_t size = (uint64_t)m->comm->size, rank = (uint64_t)m->comm->rank;
    const size_t count = count_chunks(source);
    m->movers = calloc(count + 1, sizeof *m->movers);
    m->first_chunks = calloc(source->ntensors + 1, sizeof *m->first_chunks);
    fc_code mine = m->movers && m->first_chunks ? FC_OK : fc_no_memory(err, source->path);
    FC_TRY(fc_ranks_agree(m->comm, mine, err));
    size_t at = 0;
    for (size_t i = 0; i < source->ntensors; i++) {
        m->first_chunks[i] = at;
        for (size_t k = 0; k < source->tensors[i].nchunks; k++, at++) {
            m->movers[at] = fc_memory_has_data(source, i, k) ? (rank + size - at % size) % size : UINT64_MAX;
        }
    }
    FC_TRY(m->comm->all_reduce(m->comm, m->movers, count, FC_U64, FC_REDUCE_MIN, err));
    for (size_t i = 0; i < count; i++) {
        m->movers[i] = m->movers[i] < size ? (m->movers[i] + i) % size : UINT64_MAX;
    }
    return check_movers(m, err);
}

static bool moves(const fc_conversion *m, size_t tensor, size_t chunk) {
    return m->movers[m->first_chunks[tensor] + chunk] == (uint64_t)m->comm->rank;
}

/* ---- the parts of a file ---- */

/* The boxes that this rank moves into a file. */
typedef struct parts {
    const fc_conversion *m;
    fc_arena *arena; /* owns the dims of the items */
    fc_target_item *items;
    size_t *whole; /* for each, the index of the item that it is a box of */
    size_t count, capacity, whole_capacity;
} parts;

/* Adds the box `dims` of an item, whose first element is number `start` in the row-major order of the item. */
static fc_code add_part(parts *p, const fc_target_file *file, size_t index, const int64_t *dims, int64_t start,
                        fc_error *err) {
    const fc_target_item *item = &file->items[index];
    const fc_target_tensor *t = &p->m->target->tensors[item->tensor];
    int64_t *own = fc_arena_copy(p->arena, dims, 2 * (size_t)t->source->ndim, sizeof *dims);
    FC_NEED(own && fc_grow(&p->items, &p->capacity, p->count + 1, sizeof *p->items) &&
                fc_grow(&p->whole, &p->whole_capacity, p->count + 1, sizeof *p->whole),
            err, file->path);
    p->items[p->count] = *item;
    p->items[p->count].dims = own;
    p->items[p->count].offset += (uint64_t)start * fc_dtype_size(t->dtype);
    p->whole[p->count++] = index;
    return FC_OK;
}

/* Returns the number of outer dimensions, along which the elements of `sizes` are not contiguous in a box of `within`.
 */
static int outer_dims(int ndim, const int64_t *sizes, const int64_t *within) {
    int d = ndim;
    while (d > 0 && sizes[d - 1] == within[d - 1]) {
        d--;
    }
    return d > 0 ? d - 1 : 0; /* along the first partial dimension they are contiguous, too */
}

static int64_t row_major_index(int ndim, const int64_t *offsets, const fc_box *box) {
    int64_t index = 0;
    for (int d = 0; d < ndim; d++) {
        index = index * box->sizes[d] + offsets[d] - box->offsets[d];
    }
    return index;
}

/* Adds a box of an item as boxes that are contiguous in the item. */
static fc_code add_box(parts *p, const fc_target_file *file, size_t index, const fc_box *item, const int64_t *offsets,
                       const int64_t *sizes, fc_error *err) {
    const int ndim = item->ndim, outer = outer_dims(ndim, sizes, item->sizes);
    int64_t dims[2 * FC_MAX_DIMS], rows = 1;
    for (int d = 0; d < ndim; d++) {
        dims[d] = offsets[d];
        dims[ndim + d] = d < outer ? 1 : sizes[d];
        rows *= d < outer ? sizes[d] : 1;
    }
    for (int64_t row = 0; row < rows; row++) {
        FC_TRY(add_part(p, file, index, dims, row_major_index(ndim, dims, item), err));
        for (int d = outer; d-- > 0 && ++dims[d] == offsets[d] + sizes[d];) {
            dims[d] = offsets[d];
        }
    }
    return FC_OK;
}

/* Adds what this rank moves of one item. */
static fc_code add_item(parts *p, const fc_target_file *file, size_t index, fc_error *err) {
    const fc_target_item *item = &file->items[index];
    const fc_tensor *t = p->m->target->tensors[item->tensor].source;
    const size_t number = (size_t)(t - p->m->target->source->tensors);
    const fc_box box = {t->ndim, item->dims, item->dims + t->ndim};
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    for (size_t k = 0; k < t->nchunks; k++) {
        const fc_box chunk = fc_chunk_box(t, &t->chunks[k]);
        if (moves(p->m, number, k) && fc_box_intersect(&box, &chunk, offsets, sizes)) {
            FC_TRY(add_box(p, file, index, &box, offsets, sizes, err));
        }
    }
    return FC_OK;
}

/* ---- CRCs ---- */

static uint64_t bytes_after(const fc_target *target, const fc_target_item *whole, const fc_target_item *part) {
    return whole->offset + fc_target_item_bytes(target, whole) - part->offset - fc_target_item_bytes(target, part);
}

/* Adds the CRCs of the parts up to those of their items. Finishing is an XOR with a constant: doing it twice undoes it.
 */
static void add_crcs(const parts *p, const fc_target_file *file) {
    const fc_target *target = p->m->target;
    const bool crc32 = p->m->move.crc32;
    for (size_t i = 0; i < file->nitems; i++) {
        fc_target_item *item = &file->items[i];
        if (item->owned) {
            item->crc64 = fc_crc64_finish(0, fc_target_item_bytes(target, item));
            item->crc32 = crc32 ? fc_crc32_finish(0, fc_target_item_bytes(target, item)) : 0;
        }
    }
    for (size_t i = 0; i < p->count; i++) {
        const fc_target_item *part = &p->items[i];
        fc_target_item *whole = &file->items[p->whole[i]];
        const uint64_t bytes = fc_target_item_bytes(target, part), after = bytes_after(target, whole, part);
        whole->crc64 ^= fc_crc64_shift(fc_crc64_finish(part->crc64, bytes), after);
        if (crc32) {
            whole->crc32 ^= fc_crc32_shift(fc_crc32_finish(part->crc32, bytes), after);
        }
    }
}

static fc_code move_parts(const fc_conversion *m, const fc_target_file *file, const parts *p, fc_error *err) {
    fc_target_file own = *file;
    fc_move_options options = m->move;
    own.items = p->items;
    own.nitems = p->count;
    options.share = m->leads ? 0 : 1; /* the leader allocates the file */
    options.shares = 0;
    options.writer = NULL; /* other ranks have other parts of the items */
    return p->count > 0 || m->leads ? fc_move_file(m->target, &own, &options, err) : FC_OK;
}

fc_code fc_held_move_file(const fc_conversion *m, const fc_target_file *file, fc_error *err) {
    parts p = {.m = m, .arena = fc_arena_new()};
    fc_code rc;
    FC_TRY_GOTO(p.arena ? FC_OK : fc_no_memory(err, file->path), rc, out);
    for (size_t i = 0; i < file->nitems; i++) {
        FC_TRY_GOTO(file->items[i].owned ? add_item(&p, file, i, err) : FC_OK, rc, out);
    }
    FC_TRY_GOTO(move_parts(m, file, &p, err), rc, out);
    add_crcs(&p, file);
out:
    free(p.items);
    free(p.whole);
    fc_arena_free(p.arena);
    return rc;
}
