/*
 * Flattens a checkpoint: the engine sees it as another format. Each flat parameter is divided into chunks, and a chunk
 * is assembled from runs of parameters (sharding/flat_runs.h) when it is read.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/path.h"
#include "derived/flatten_private.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"
#include "read/box.h"
#include "sharding/flat_runs.h"

#include <stdlib.h>
#include <string.h>

/*
 * Bytes of a chunk (a worker holds one or two), and the largest number of chunks per flat parameter unless there are
 * more ranks.
 */
enum { CHUNK_BYTES = 1 << 20, MOST_CHUNKS = 1 << 16 };

/* ---- computing a chunk ---- */

/* Reads the part of a parameter that is in elements [first, last) of the flat parameter. */
static fc_code read_param(const fc_checkpoint *source, const fc_flat_value *o, size_t param, int64_t first,
                          int64_t last, unsigned char *buf, fc_source_crc *crc, fc_error *err) {
    const fc_flat_param *p = &o->layout.params[param];
    const fc_tensor *t = o->params[param];
    int64_t from = first > p->offset ? first - p->offset : 0;
    int64_t to = last < p->offset + p->numel ? last - p->offset : p->numel;
    int64_t dims[2 * FC_MAX_DIMS], start;
    fc_flat_run run;
    if (from >= to || !fc_flat_run_start(&run, p->ndim, p->shape, from, to)) {
        return FC_OK;
    }
    while (t && fc_flat_run_next(&run, dims, &start)) {
        const fc_box box = {p->ndim, dims, dims + p->ndim};
        size_t at = (size_t)(p->offset + start - first) * fc_dtype_size(t->dtype);
        FC_TRY(fc_read_box_crc(source, t, &box, t->dtype, buf + at, crc, err));
    }
    return FC_OK;
}

/* Returns the first parameter that ends after element `at`. */
static size_t first_param(const fc_flat_layout *layout, int64_t at) {
    size_t low = 0;
    FC_BISECT(low, layout->nparams, mid, layout->params[mid].offset + layout->params[mid].numel <= at);
    return low;
}

static fc_code compute_flat(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                            void *buf, fc_error *err) {
    const fc_flat_value *o = tensor->detail;
    int64_t first = tensor->chunks[index].dims[0], last = first + tensor->chunks[index].dims[1];
    memset(buf, 0,
           (size_t)fc_chunk_data_bytes(tensor, &tensor->chunks[index])); /* padding, and parameters without state */
    for (size_t i = first_param(&o->layout, first); i < o->layout.nparams && o->layout.params[i].offset < last; i++) {
        FC_TRY(read_param(derived->sources[0], o, i, first, last, buf, crcs[0], err));
    }
    return FC_OK;
}

static const fc_derived_kind flattened_kind = {.size = sizeof(fc_derived), .compute = compute_flat};

bool fc_is_flattened(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    return fc_derived_of(checkpoint, &flattened_kind) &&
           ((const fc_origin *)tensor->detail)->kind == FC_ORIGIN_COMPUTED;
}

/* ---- the manifest ---- */

static const char *copy_text(const fc_flattener *b, const char *text) {
    return fc_arena_strndup(b->out->arena, text, strlen(text));
}

static fc_code copy_name(const fc_flattener *b, const fc_target_tensor *w, fc_tensor *t) {
    t->name = copy_text(b, w->name);
    return t->name && fc_path_copy(b->out->arena, &w->path, &t->path) ? FC_OK : fc_no_memory(b->err, b->source->path);
}

fc_tensor *fc_flatten_add(fc_flattener *f, fc_flat_value **value) {
    *value = fc_arena_calloc(f->out->arena, 1, sizeof **value);
    if (!*value) {
        return NULL;
    }
    if (!fc_grow(&f->tensors, &f->capacity, f->count + 1, sizeof *f->tensors)) {
        return NULL;
    }
    (*value)->from.kind = FC_ORIGIN_COMPUTED;
    fc_tensor *t = &f->tensors[f->count++];
    *t = (fc_tensor){.detail = *value};
    return t;
}

fc_code fc_flatten_keep(fc_flattener *f, const fc_target_tensor *w) {
    fc_flat_value *value;
    fc_tensor *t = fc_flatten_add(f, &value);
    FC_NEED(t, f->err, f->source->path);
    *t = *w->source;
    t->detail = value;
    t->placements = NULL; /* they refer to a mesh that the other tensors do not have */
    value->from = (fc_origin){.tensor = w->source};
    return copy_name(f, w, t);
}

/* Names a flat parameter: "model" + "layers.0._flat_param", in the dict of the unit's parameters. */
static fc_code name_flat(const fc_flattener *b, const fc_unit *u, const fc_target_tensor *first, fc_tensor *t) {
    fc_arena *arena = b->out->arena;
    size_t n = first->path.count > 0 ? first->path.count : 1, skip = 0;
    fc_path_element *path = fc_arena_calloc(arena, n, sizeof *path);
    const char *fqn = u->fqn;
    for (size_t i = 0; path && i + 1 < n; i++) {
        path[i] = first->path.elements[i];
        path[i].key = copy_text(b, path[i].key);
        path = path[i].key ? path : NULL;
        skip += strlen(first->path.elements[i].key) + 1;
    }
    fqn = strlen(fqn) + 1 > skip ? fqn + skip : "";
    char *key = path ? fc_arena_printf(arena, "%s%s_flat_param", fqn, *fqn ? "." : "") : NULL;
    t->name = key ? fc_arena_printf(arena, "%s%s_flat_param", u->fqn, *u->fqn ? "." : "") : NULL;
    FC_NEED(t->name, b->err, b->source->path);
    path[n - 1] = (fc_path_element){.key = key};
    t->path = (fc_path){path, n};
    return FC_OK;
}

/*
 * Chunks have at most CHUNK_BYTES, or more in very large parameters. No chunk crosses the boundary between two ranks.
 */
fc_code fc_flatten_into_chunks(fc_flattener *f, fc_tensor *t, fc_flat_value *value, int64_t numel) {
    int64_t shard = numel / f->ranks + (numel % f->ranks != 0);
    int64_t size = fc_dtype_size(t->dtype), chunk = CHUNK_BYTES / size, bytes;
    int64_t *shape = fc_arena_calloc(f->out->arena, 1, sizeof *shape);
    FC_NEED(shape, f->err, f->source->path);
    *shape = numel;
    t->ndim = 1;
    t->shape = shape;
    if (f->source->format->layout_only) {
        return FC_OK;
    }
    if (!fc_mul_i64(numel, size, &bytes)) {
        return fc_fail(f->err, FC_EUSAGE, "%s: '%.256s': its size overflows", f->source->path, t->name);
    }
    chunk = chunk > numel / MOST_CHUNKS ? chunk : numel / MOST_CHUNKS + 1;
    chunk = chunk < shard ? chunk : shard;
    int64_t shards = (numel - 1) / shard + 1, per_shard = (shard - 1) / chunk + 1;
    size_t most = (size_t)shards * (size_t)per_shard, n = 0;
    fc_chunk *chunks = fc_arena_calloc(f->out->arena, most, sizeof *chunks);
    int64_t *dims = fc_arena_calloc(f->out->arena, most, 2 * sizeof *dims);
    FC_NEED(chunks && dims, f->err, f->source->path);
    for (int64_t at = 0, length; at < numel; at += length, dims += 2, n++) {
        int64_t rest = shard - at % shard;
        length = chunk < rest ? chunk : rest;
        length = length < numel - at ? length : numel - at;
        dims[0] = at;
        dims[1] = length;
        chunks[n] = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
    }
    t->chunks = chunks;
    t->nchunks = n;
    return fc_derived_record_reads(f->out, t, &value->from, f->err);
}

fc_code fc_flatten_check_whole(const fc_flattener *b, const fc_tensor *t) {
    fc_coverage *coverage = NULL;
    if (b->source->format->layout_only) {
        return FC_OK;
    }
    fc_code rc = fc_coverage_within(b->source, t, NULL, &coverage, b->err);
    fc_coverage_free(coverage);
    return rc == FC_OK ? rc : fc_context(b->err, rc, "%s", b->source->path);
}

/* Finds the source tensors of a unit's parameters. */
static fc_code find_params(const fc_flattener *b, const fc_unit *u, fc_flat_value *o) {
    o->params = fc_arena_calloc(b->out->arena, u->nparameters, sizeof *o->params);
    FC_NEED(o->params, b->err, b->source->path);
    for (size_t i = 0; i < u->nparameters; i++) {
        o->params[i] = b->target->tensors[b->tree->parameters[u->parameters[i]].spec].source;
        FC_TRY(fc_flatten_check_whole(b, o->params[i]));
    }
    return FC_OK;
}

static fc_code describe_unit(const fc_flattener *b, const fc_unit *u, fc_arena *scratch, fc_flat_layout *layout) {
    const fc_flat_desc *descs = NULL;
    FC_TRY(fc_unit_flat_descs(b->tree, u, scratch, &descs, b->err));
    return fc_flat_layout_new(descs, u->nnames, b->ranks, false, FC_F32, b->out->arena, layout, b->err);
}

static fc_code lay_out(const fc_flattener *b, const fc_unit *u, fc_arena *scratch, fc_flat_layout *layout) {
    FC_TRY_CONTEXT(describe_unit(b, u, scratch, layout), b->err, "%s: unit '%s'", b->source->path, u->fqn);
    if (layout->nparams != u->nparameters) {
        return fc_fail(b->err, FC_EUNSUPPORTED,
                       "%s: unit '%s' shares parameters with another unit, which is not supported", b->source->path,
                       u->fqn);
    }
    return FC_OK;
}

static fc_code add_unit(fc_flattener *b, const fc_unit *u, const fc_flat_layout *layout) {
    fc_flat_value *o = NULL;
    fc_tensor *t = fc_flatten_add(b, &o);
    FC_NEED(t, b->err, b->source->path);
    FC_TRY(find_params(b, u, o));
    o->layout = *layout;
    t->dtype = layout->dtype;
    FC_TRY(name_flat(b, u, &b->target->tensors[b->tree->parameters[u->parameters[0]].spec], t));
    return fc_flatten_into_chunks(b, t, o, layout->numel);
}

static int compare_unit_modules(const void *a, const void *b) {
    const fc_unit *const *x = a, *const *y = b;
    return ((*x)->module > (*y)->module) - ((*x)->module < (*y)->module);
}

/*
 * Adds the units in the order of their modules. The wrapped model's parameters and state_dict() have that order, and an
 * optimizer numbers them in it.
 */
static fc_code add_units(fc_flattener *b, fc_arena *scratch) {
    size_t count = b->units->count;
    const fc_unit **sorted = fc_arena_calloc(scratch, count, sizeof *sorted);
    fc_flat_layout *layouts = fc_arena_calloc(scratch, count, sizeof *layouts);
    FC_NEED(sorted && layouts, b->err, b->source->path);
    for (size_t u = 0; u < count; u++) {
        sorted[u] = &b->units->units[u];
    }
    fc_sort_items(sorted, count, sizeof *sorted, compare_unit_modules);
    for (size_t u = 0; u < count; u++) {
        fc_flat_layout *layout = &layouts[sorted[u] - b->units->units];
        if (sorted[u]->nparameters > 0) {
            FC_TRY(lay_out(b, sorted[u], scratch, layout));
            FC_TRY(add_unit(b, sorted[u], layout));
        }
    }
    b->layouts = layouts;
    return FC_OK;
}

/* Marks the target tensors that belong to units. */
static void find_units(const fc_flattener *b, bool *taken) {
    for (size_t u = 0; u < b->units->count; u++) {
        const fc_unit *at = &b->units->units[u];
        for (size_t i = 0; i < at->nnames; i++) {
            uint32_t spec = b->tree->parameters[at->names[i]].spec;
            if (spec < b->target->ntensors) {
                taken[spec] = true;
            }
        }
    }
}

/*
 * Adds the flat parameters where the first of their values is, all other values in their order, and the optimizers'
 * state at the end.
 */
static fc_code add_values(fc_flattener *b, fc_arena *scratch) {
    const fc_target *target = b->target;
    bool *flat = fc_arena_calloc(scratch, target->ntensors, sizeof *flat);
    bool *state = fc_arena_calloc(scratch, target->ntensors, sizeof *state);
    FC_NEED(flat && state, b->err, b->source->path);
    find_units(b, flat);
    fc_flatten_find_state(b, state);
    for (size_t i = 0; i < target->ntensors; i++) {
        if (flat[i] && !b->layouts) {
            FC_TRY(add_units(b, scratch));
        } else if (!flat[i] && !state[i]) {
            FC_TRY(fc_flatten_keep(b, &target->tensors[i]));
        }
    }
    return fc_flatten_state(b, scratch);
}

fc_code fc_flatten(fc_checkpoint *source, const fc_target *target, const fc_module_tree *tree, const fc_units *units,
                   int64_t ranks, fc_checkpoint **out, fc_error *err) {
    fc_arena *scratch = fc_arena_new();
    fc_checkpoint *made = NULL;
    *out = NULL;
    fc_flattener b = {.source = source, .target = target, .tree = tree, .units = units, .ranks = ranks, .err = err};
    fc_code rc;
    FC_TRY_GOTO(scratch ? FC_OK : fc_no_memory(err, source->path), rc, out);
    FC_TRY_GOTO(fc_derived_new(&flattened_kind, &source, 1, &made, err), rc, out);
    made->keeps_order = false;
    b.out = made;
    FC_TRY_GOTO(add_values(&b, scratch), rc, out);
    FC_TRY_GOTO(fc_derived_collect_crcs(made, err), rc, out);
    rc = fc_derived_set_tensors(made, b.tensors, b.count, err);
out:
    free(b.tensors);
    fc_arena_free(scratch);
    return fc_derived_finish(made, rc, out);
}
