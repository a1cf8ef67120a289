/*
 * Builds the tensors of the manifest: their names, whole values, and the boxes that cover runs of flat partitions.
 */
#include "deepspeed/build.h"

#include "base/grow.h"
#include "base/text.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"
#include "sharding/flat_runs.h"

#include <stdlib.h>
#include <string.h>

/* ---- values of pickles ---- */

fc_pv fc_ds_get(const fc_pickle *p, fc_pv v, const char *key) {
    return fc_pv_typeof(v) == FC_PV_DICT ? fc_torch_dict_get(p, v, key) : 0;
}

const fc_pv *fc_ds_list(const fc_pickle *p, fc_pv v, size_t *count) {
    *count = 0;
    switch (fc_pv_typeof(v)) {
    case FC_PV_LIST:
        return fc_pickle_items(p, v, count);
    case FC_PV_TUPLE:
    case FC_PV_SIZE:
        return fc_pickle_tuple(p, v, count);
    default:
        return NULL;
    }
}

bool fc_ds_int(const fc_pickle *p, fc_pv v, int64_t *out) {
    size_t n = 0;
    if (fc_pv_typeof(v) != FC_PV_CALL) {
        return fc_pickle_int(p, v, out);
    }
    const fc_pv *arguments = fc_ds_list(p, fc_pickle_arguments(p, v), &n);
    return n == 1 && fc_pickle_int(p, arguments[0], out);
}

fc_code fc_ds_stage_of(const fc_ds_builder *b, const torch_file *f, fc_pv state_dict, int *stage) {
    int64_t value = 1;
    fc_pv v = fc_ds_get(f->p, state_dict, "zero_stage");
    if (v && (!fc_ds_int(f->p, v, &value) || value < 1 || value > 3)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: zero_stage is not 1, 2 or 3", f->path);
    }
    *stage = (int)value;
    return FC_OK;
}

/* ---- tensors ---- */

fc_ds_tensor *fc_ds_add_tensor(fc_ds_builder *b, const char *name, const fc_path_element *elements, size_t count) {
    fc_arena *arena = b->checkpoint->arena;
    if (!fc_grow(&b->tensors, &b->tensors_capacity, b->ntensors + 1, sizeof *b->tensors)) {
        return NULL;
    }
    fc_path_element *path = fc_arena_calloc(arena, count, sizeof *path);
    fc_ds_tensor *t = &b->tensors[b->ntensors];
    *t = (fc_ds_tensor){.name = fc_arena_strndup(arena, name, strlen(name)), .path = {path, count}};
    if (!path || !t->name) {
        return NULL;
    }
    memcpy(path, elements, count * sizeof *path);
    b->ntensors++;
    return t;
}

/* @return NULL when out of memory. */
static fc_chunk *next_chunk(fc_ds_tensor *t) {
    return fc_grow(&t->chunks, &t->capacity, t->nchunks + 1, sizeof *t->chunks) ? &t->chunks[t->nchunks++] : NULL;
}

static fc_code set_tensor(const fc_ds_builder *b, const fc_torch_tensor *d, const torch_extent *extent,
                          fc_ds_tensor *t) {
    int64_t *dims = fc_arena_calloc(b->checkpoint->arena, 2 * (size_t)d->ndim, sizeof *dims);
    FC_NEED(dims && fc_numel(d->ndim, d->sizes, &t->numel), b->err, b->checkpoint->path);
    for (int i = 0; i < d->ndim; i++) {
        dims[d->ndim + i] = d->sizes[i];
    }
    t->dtype = d->dtype;
    t->ndim = d->ndim;
    t->shape = dims + d->ndim;
    fc_chunk *chunk = t->numel > 0 ? next_chunk(t) : NULL;
    FC_NEED(t->numel <= 0 || chunk, b->err, b->checkpoint->path);
    if (chunk) {
        *chunk = fc_torch_chunk(dims, extent, FC_NO_RANK);
    }
    return FC_OK;
}

fc_code fc_ds_add_value(fc_ds_builder *b, const torch_file *f, const fc_path_element *elements, size_t count, fc_pv v) {
    const char *name = fc_path_spell(b->checkpoint->arena, &(fc_path){elements, count}, '.');
    fc_ds_tensor *t = name ? fc_ds_add_tensor(b, name, elements, count) : NULL;
    fc_torch_tensor decoded;
    torch_extent *extent = NULL;
    torch_object *object = NULL;
    FC_NEED(t, b->err, b->checkpoint->path);
    fc_code rc;
    if (fc_torch_is_tensor(f->p, v)) {
        rc = fc_torch_find_extent(f, v, &decoded, b->checkpoint->arena, &extent, b->err);
        return rc == FC_OK ? set_tensor(b, &decoded, extent, t) : fc_context(b->err, rc, "%s: %.256s", f->path, name);
    }
    rc = fc_torch_object_new(f, v, b->checkpoint->arena, &object, b->err);
    t->object = object;
    t->object_file = f->index;
    return rc == FC_OK ? rc : fc_context(b->err, rc, "%s: %.256s", f->path, name);
}

fc_code fc_ds_add_values(fc_ds_builder *b, const torch_file *f, const fc_path_element *elements, size_t count,
                         fc_pv v) {
    fc_pv_type type = fc_pv_typeof(v);
    if (type != FC_PV_DICT && type != FC_PV_LIST && type != FC_PV_TUPLE) {
        return fc_ds_add_value(b, f, elements, count, v);
    }
    fc_pickle rooted = *f->p; /* the same pickle with `v` as its root */
    torch_file view = *f;
    fc_path prefix = {elements, count};
    torch_leaves leaves = {.arena = b->checkpoint->arena};
    rooted.root = v;
    view.p = &rooted;
    fc_code rc;
    FC_TRY_GOTO(fc_torch_flatten(&view, &prefix, &leaves, b->err), rc, out);
    for (size_t i = 0; i < leaves.count; i++) {
        FC_TRY_GOTO(fc_ds_add_value(b, f, leaves.items[i].path.elements, leaves.items[i].path.count, leaves.items[i].v),
                    rc, out);
    }
out:
    free(leaves.items);
    return rc;
}

fc_code fc_ds_check_keys(const fc_ds_builder *b, const torch_file *f, size_t count) {
    enum { MOST_KEYS = 64 };
    return count <= MOST_KEYS
               ? FC_OK
               : fc_fail(b->err, FC_EUNSUPPORTED,
                         "%s: the optimizer keeps %zu values for each parameter, but more than %d are not supported",
                         f->path, count, MOST_KEYS);
}

/* ---- flat partitions ---- */

fc_code fc_ds_flat(const fc_ds_builder *b, const torch_file *f, const char *what, fc_pv v, fc_torch_tensor *t,
                   torch_extent **extent) {
    if (!fc_torch_is_tensor(f->p, v)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: %s is not a tensor", f->path, what);
    }
    FC_TRY_CONTEXT(fc_torch_find_extent(f, v, t, b->checkpoint->arena, extent, b->err), b->err, "%s", f->path);
    if (t->ndim != 1 || (t->sizes[0] > 1 && t->strides[0] != 1)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: %s is not a contiguous tensor of one dimension", f->path, what);
    }
    return FC_OK;
}

int64_t fc_ds_count_flat(const torch_file *f, fc_pv v) {
    fc_torch_tensor t;
    return fc_torch_is_tensor(f->p, v) && fc_torch_tensor_decode(f->p, v, &t, NULL) == FC_OK && t.ndim == 1 ? t.sizes[0]
                                                                                                            : -1;
}

/* The extent of a row-major box of `sizes` that starts `at` elements into a flat tensor. */
static torch_extent *box_extent(fc_arena *arena, const torch_extent *flat, int64_t at, int ndim, const int64_t *sizes,
                                uint32_t element) {
    torch_extent *extent = fc_arena_alloc(arena, sizeof *extent + (size_t)ndim * sizeof *extent->strides);
    if (extent) {
        *extent = *flat;
        extent->first = flat->first + (uint64_t)at * element;
        fc_row_major_strides(ndim, sizes, extent->strides);
    }
    return extent;
}

fc_code fc_ds_add_run(const fc_ds_builder *b, fc_ds_tensor *t, const torch_extent *extent, int64_t at, int64_t first,
                      int64_t count, uint32_t rank) {
    fc_arena *arena = b->checkpoint->arena;
    fc_flat_run run;
    int64_t dims[2 * FC_MAX_DIMS], start;
    if (!fc_flat_run_start(&run, t->ndim, t->shape, first, first + count)) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: tensor %.256s: a partition exceeds it", b->checkpoint->path, t->name);
    }
    while (fc_flat_run_next(&run, dims, &start)) {
        size_t bytes = 2 * (size_t)t->ndim * sizeof *dims;
        int64_t *kept = fc_arena_alloc(arena, bytes);
        torch_extent *box =
            box_extent(arena, extent, at + (start - first), t->ndim, dims + t->ndim, fc_dtype_size(t->dtype));
        fc_chunk *chunk = kept && box ? next_chunk(t) : NULL;
        FC_NEED(chunk, b->err, b->checkpoint->path);
        memcpy(kept, dims, bytes);
        *chunk = fc_torch_chunk(kept, box, rank);
    }
    return FC_OK;
}

const char *fc_ds_text(fc_ds_builder *b, const torch_file *f, fc_pv v) {
    size_t n = 0;
    const char *text = fc_pv_typeof(v) == FC_PV_STR ? fc_pickle_bytes(f->p, v, &n) : NULL;
    if (!text || !fc_is_plain_text(text, n)) {
        fc_fail(b->err, FC_ECORRUPT, "%s: the name of a parameter is not a string", f->path);
        return NULL;
    }
    if (fc_torch_unfold(f, n, b->err) != FC_OK) { /* many values may have one long name */
        return NULL;
    }
    const char *copy = fc_arena_strndup(b->checkpoint->arena, text, n);
    if (!copy) {
        fc_ds_no_memory(b);
    }
    return copy;
}
