/*
 * Builds tensors and chunks from the headers of all files. In the shard files of torch's HuggingFaceStorageWriter a
 * tensor has an entry in several files, and its shape is the extent of their boxes. Everywhere else a tensor has one
 * entry.
 */
#include "base/checked.h"
#include "base/name_table.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "safetensors/safetensors.h"
#include "sharding/recorded.h"

#include <stdlib.h>
#include <string.h>

/* An entry and its file. */
typedef struct occurrence {
    const fc_st_entry *entry;
    uint32_t file;
    size_t order; /* index among the entries of all files */
    size_t first; /* that of the first entry of the same name */
} occurrence;

/* The entries of one tensor, which are adjacent in the sorted list. */
typedef struct group {
    const occurrence *items;
    size_t count;
} group;

static const char *path_of(const fc_st_reader *o, const occurrence *at) {
    return o->files.files[at->file].path;
}

static int compare_occurrences(const void *a, const void *b) {
    const occurrence *x = a, *y = b;
    return x->first != y->first ? (x->first > y->first) - (x->first < y->first)
                                : (x->order > y->order) - (x->order < y->order);
}

/* ---- one tensor ---- */

static fc_code check_alike(const fc_st_reader *o, const occurrence *first, const occurrence *other, fc_error *err) {
    if (other->entry->dtype != first->entry->dtype || other->entry->ndim != first->entry->ndim) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: it is %s with %d dimensions here, but %s with %d in %s",
                       path_of(o, other), other->entry->name, fc_dtype_get(other->entry->dtype)->torch_name,
                       other->entry->ndim, fc_dtype_get(first->entry->dtype)->torch_name, first->entry->ndim,
                       o->files.files[first->file].name);
    }
    const int64_t *a = first->entry->global, *b = other->entry->global;
    size_t bytes = (size_t)first->entry->ndim * sizeof *a;
    if ((a != NULL) != (b != NULL) || (a && bytes && memcmp(a, b, bytes) != 0)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: its global shape differs from that in %s: files of two checkpoints are "
                       "mixed here",
                       path_of(o, other), other->entry->name, o->files.files[first->file].name);
    }
    return FC_OK;
}

/* Offsets are zero for a tensor that is not sharded. */
static fc_code read_offsets(const fc_st_reader *o, const occurrence *at, int64_t *offsets, fc_error *err) {
    const fc_st_entry *e = at->entry;
    bool shards = o->files.kind == ST_SHARDS;
    if (shards && !e->offsets) {
        return fc_fail(
            err, FC_ECORRUPT,
            "%s: tensor %.256s: DCP_SHARDING_INFO in __metadata__ lacks it, so the offsets of this shard are "
            "unknown",
            path_of(o, at), e->name);
    }
    for (int d = 0; d < e->ndim; d++) {
        offsets[d] = e->offsets ? e->offsets[d] : 0;
        if (!shards && offsets[d] != 0) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: tensor %.256s: it is a shard, but the name of the file is not that of a shard file "
                           "(shard-00001-model-00001-of-00001.safetensors): the file was renamed",
                           path_of(o, at), e->name);
        }
    }
    return FC_OK;
}

/* Unless the files record the global shape, `shape` grows to contain the box. */
static fc_code read_box(const fc_st_reader *o, const occurrence *at, int64_t *dims, int64_t *shape, fc_error *err) {
    const fc_st_entry *e = at->entry;
    FC_TRY(read_offsets(o, at, dims, err));
    for (int d = 0; d < e->ndim; d++) {
        int64_t end;
        dims[e->ndim + d] = e->shape[d];
        if (!fc_add_i64(dims[d], e->shape[d], &end) || (e->global && end > e->global[d])) {
            return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the shard exceeds the tensor", path_of(o, at),
                           e->name);
        }
        if (end > shape[d]) {
            shape[d] = end;
        }
    }
    return FC_OK;
}

static bool is_empty(const fc_st_entry *e) {
    return e->begin == e->end;
}

static fc_code add_chunks(const fc_st_reader *o, const group *g, int64_t *shape, fc_tensor *t, fc_error *err) {
    const fc_st_entry *first = g->items[0].entry;
    size_t ndim = (size_t)first->ndim;
    fc_chunk *chunks = fc_arena_calloc(o->checkpoint->arena, g->count, sizeof *chunks);
    int64_t *dims = fc_arena_calloc(o->checkpoint->arena, g->count, (2 * ndim + 1) * sizeof *dims);
    bool digests = true;
    FC_NEED(chunks && dims, err, o->checkpoint->path);
    for (size_t i = 0; i < g->count; i++) {
        const occurrence *at = &g->items[i];
        const fc_st_header *header = &o->headers[at->file];
        FC_TRY(check_alike(o, &g->items[0], at, err));
        FC_TRY(read_box(o, at, dims, shape, err));
        digests = digests && header->has_digests;
        if (!is_empty(at->entry)) {
            chunks[t->nchunks++] = (fc_chunk){
                .dims = dims,
                .place = fc_place_bytes(at->file, header->data + at->entry->begin, at->entry->end - at->entry->begin),
                .rank = o->files.ranks ? o->files.ranks[at->file] : FC_NO_RANK,
                .detail = at->entry->crc64};
        }
        dims += 2 * ndim;
    }
    t->chunks = chunks;
    t->detail = digests ? chunks : NULL; /* if set, the details of the chunks are digests */
    return FC_OK;
}

static fc_code set_path(const fc_st_reader *o, const fc_st_entry *e, fc_tensor *t, fc_error *err) {
    t->path = (fc_path){e->path, e->path_count};
    if (!e->path) {
        fc_path_element *flat = fc_arena_alloc(o->checkpoint->arena, sizeof *flat);
        FC_NEED(flat, err, o->checkpoint->path);
        *flat = (fc_path_element){e->name, false};
        t->path = (fc_path){flat, 1};
    }
    return FC_OK;
}

static fc_code set_placements(const fc_st_reader *o, const fc_st_entry *e, fc_tensor *t, fc_error *err) {
    int count = o->checkpoint->mesh.ndim;
    if (count == 0 || !e->placements) {
        return FC_OK;
    }
    fc_placement *placements = fc_arena_calloc(o->checkpoint->arena, (size_t)count, sizeof *placements);
    FC_NEED(placements, err, o->checkpoint->path);
    if (!fc_placements_parse(e->placements, count, placements)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the placements %.128s do not fit the mesh",
                       o->checkpoint->path, e->name, e->placements);
    }
    t->placements = placements;
    return FC_OK;
}

static fc_code build_tensor(const fc_st_reader *o, const group *g, fc_tensor *t, fc_error *err) {
    const fc_st_entry *first = g->items[0].entry;
    int64_t elements;
    if (g->count > 1 && o->files.kind != ST_SHARDS) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s is in %s and in %s: give the path of one file",
                       o->checkpoint->path, first->name, o->files.files[g->items[0].file].name,
                       o->files.files[g->items[1].file].name);
    }
    int64_t *shape = fc_arena_calloc(o->checkpoint->arena, (size_t)first->ndim, sizeof *shape);
    FC_NEED(shape, err, o->checkpoint->path);
    *t = (fc_tensor){.name = first->name, .dtype = first->dtype, .ndim = first->ndim, .shape = shape};
    if (first->global && o->files.kind == ST_SHARDS) {
        memcpy(shape, first->global, (size_t)first->ndim * sizeof *shape);
    }
    FC_TRY(add_chunks(o, g, shape, t, err));
    uint64_t bytes;
    if (!fc_numel(t->ndim, shape, &elements) || !fc_mul_u64((uint64_t)elements, fc_dtype_size(FC_C128), &bytes)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the product of its sizes overflows", path_of(o, g->items),
                       t->name);
    }
    FC_TRY(set_path(o, first, t, err));
    return set_placements(o, first, t, err);
}

/* ---- all tensors ---- */

/* Lists the entries of all files, those of one name one after the other. `*count` is the number of names. */
static fc_code list_occurrences(const fc_st_reader *o, occurrence *all, size_t total, size_t *count, fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    fc_name_table *names = scratch ? fc_name_table_new(scratch, total) : NULL;
    size_t n = 0;
    *count = 0;
    for (size_t f = 0; names && f < o->files.nfiles; f++) {
        for (size_t i = 0; i < o->headers[f].nentries; i++, n++) {
            const fc_st_entry *e = &o->headers[f].entries[i];
            all[n] = (occurrence){e, (uint32_t)f, n, fc_name_table_put(names, e->name, strlen(e->name), n)};
            *count += all[n].first == n;
        }
    }
    fc_arena_free(scratch);
    fc_sort_items(all, n, sizeof *all, compare_occurrences);
    return names ? FC_OK : fc_no_memory(err, o->checkpoint->path);
}

fc_code fc_st_build_tensors(fc_st_reader *o, size_t extra, fc_error *err) {
    size_t total = 0, count = 0;
    for (size_t f = 0; f < o->files.nfiles; f++) {
        total += o->headers[f].nentries;
    }
    occurrence *all = calloc(total + 1, sizeof *all);
    fc_code rc;
    FC_TRY_GOTO(all ? list_occurrences(o, all, total, &count, err) : fc_no_memory(err, o->checkpoint->path), rc, out);
    o->tensors = fc_arena_calloc(o->checkpoint->arena, count + extra, sizeof *o->tensors);
    FC_TRY_GOTO(o->tensors ? FC_OK : fc_no_memory(err, o->checkpoint->path), rc, out);
    for (size_t i = 0; i < total;) {
        group g = {&all[i], 1};
        while (i + g.count < total && all[i + g.count].first == all[i].first) {
            g.count++;
        }
        FC_TRY_GOTO(build_tensor(o, &g, &o->tensors[o->ntensors++], err), rc, out);
        i += g.count;
    }
out:
    free(all);
    return rc;
}
