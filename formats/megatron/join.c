/*
 * Builds tensors from the values of all ranks. Shards of parameters are joined along the dimension that rules.c
 * determines. Copies are compared, mostly by the CRC-32s of the archives. Other values that differ between ranks are
 * kept for each rank: "args" is that of the first rank, "args.mp_rank_01" that of another.
 */
#include "megatron/stages.h"

#include "base/checked.h"
#include "checkpoint/path.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* Values of one name, in the order of the files. */
typedef struct group {
    fc_mg_value *const *values;
    size_t count;
} group;

typedef struct joiner {
    fc_mg_reader *r;
    fc_tensor *made;     /* malloc'ed: the tensor that begins with each value; no name: none does */
    fc_mg_value **cells; /* malloc'ed: the values of one tensor, one per shard */
} joiner;

static bool same_shape(const fc_mg_value *a, const fc_mg_value *b) {
    return a->dtype == b->dtype && fc_same_sizes(a->ndim, a->sizes, b->ndim, b->sizes);
}

static fc_code compare_values(const fc_mg_reader *r, const fc_mg_value *a, const fc_mg_value *b, bool *same) {
    *same = false;
    if (a->refusal || b->refusal || (a->object == NULL) != (b->object == NULL)) {
        return FC_OK;
    }
    if (a->object) {
        *same = fc_torch_same_object(a->object, b->object);
        return FC_OK;
    }
    return same_shape(a, b)
               ? fc_torch_same_extent(r->checkpoint, a->dtype, a->ndim, a->sizes, a->extent, b->extent, same, r->err)
               : FC_OK;
}

/* ---- tensors ---- */

static const fc_mg_place *place_of(const fc_mg_reader *r, const fc_mg_value *v) {
    return &r->grid.places[v->file % r->grid.count];
}

/* The number of ranks that a sharded value is sharded over. */
static int64_t shards_of(const fc_mg_reader *r, const fc_mg_value *v) {
    return v->expert ? r->grid.expert_tp : r->grid.tp;
}

/* The number of expert-parallel ranks, each of which has a block of the experts in the tensor. */
static int64_t blocks_of(const fc_mg_reader *r, const fc_mg_value *v) {
    return v->grouped > 0 ? r->grid.ep : 1;
}

/* Experts that are sharded over fewer ranks than the mesh has cannot be expressed as a placement. */
static fc_code set_placements(const fc_mg_reader *r, fc_tensor *t, const fc_mg_value *v,
                              const fc_mg_sharding *sharding) {
    if (r->grid.tp < 2) {
        return FC_OK;
    }
    fc_placement *placement = fc_arena_calloc(r->checkpoint->arena, 1, sizeof *placement);
    FC_NEED(placement, r->err, r->checkpoint->path);
    if ((sharding->rule == MG_SHARD || sharding->rule == MG_GATED) && shards_of(r, v) == r->grid.tp) {
        *placement = (fc_placement){FC_SHARD, sharding->dim, 0};
    }
    t->placements = placement;
    return FC_OK;
}

/* Adds a chunk with `count` rows of the value from row `from` on, where rows are along the sharded dimension. In the
 * tensor it starts at row `offset`, after `blocks` blocks of experts. */
static fc_code add_shard_chunk(const fc_mg_reader *r, fc_tensor *t, fc_chunk *chunks, const fc_mg_value *v,
                               int64_t blocks, int64_t from, int64_t count, int64_t offset) {
    fc_arena *arena = r->checkpoint->arena;
    size_t n = (size_t)v->ndim, dim = (size_t)v->sharding.dim;
    int64_t *dims = fc_arena_calloc(arena, 2 * n, sizeof *dims);
    const torch_extent *extent = v->extent;
    if (dims && from > 0) {
        torch_extent *moved = fc_arena_alloc(arena, sizeof *moved + n * sizeof *moved->strides);
        if (moved) {
            memcpy(moved, extent, sizeof *moved + n * sizeof *moved->strides);
            moved->first += (uint64_t)(from * extent->strides[dim]) * fc_dtype_size(v->dtype);
        }
        extent = moved;
    }
    FC_NEED(dims && extent, r->err, r->checkpoint->path);
    memcpy(dims + n, v->sizes, n * sizeof *dims);
    if (n > 0) {
        dims[0] = blocks * v->grouped;
        dims[dim] += offset;
        dims[n + dim] = count;
    }
    const uint32_t rank = r->grid.tp > 1 ? (uint32_t)place_of(r, v)->tensor : FC_NO_RANK;
    chunks[t->nchunks++] = fc_torch_chunk(dims, extent, rank);
    return FC_OK;
}

static fc_code describe_joined(const fc_mg_reader *r, const fc_mg_value *v, int64_t blocks, int64_t shards,
                               fc_tensor *t) {
    int64_t *shape = fc_arena_copy(r->checkpoint->arena, v->sizes, (size_t)v->ndim, sizeof *shape);
    *t = (fc_tensor){.name = v->name, .path = v->path, .dtype = v->dtype, .ndim = v->ndim, .shape = shape};
    FC_NEED(shape, r->err, r->checkpoint->path);
    if ((shards > 1 && !fc_mul_i64(shape[v->sharding.dim], shards, &shape[v->sharding.dim])) ||
        (blocks > 1 && !fc_mul_i64(shape[0], blocks, &shape[0])) || !fc_torch_shape_fits(v->dtype, v->ndim, shape)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: its size overflows", fc_mg_file(r, v->file), v->name);
    }
    return FC_OK;
}

/* Joins `blocks` times `shards` values. If there is one value, it is the whole tensor. */
static fc_code make_tensor(const fc_mg_reader *r, fc_mg_value *const *values, int64_t blocks, int64_t shards,
                           const fc_mg_sharding *sharding, fc_tensor *t) {
    const fc_mg_value *v = values[0];
    int64_t size = v->ndim > 0 ? v->sizes[sharding->dim] : 1, half = size / 2;
    bool gated = sharding->rule == MG_GATED && shards > 1;
    fc_chunk *chunks = fc_arena_calloc(r->checkpoint->arena, 2 * (size_t)(blocks * shards), sizeof *chunks);
    FC_NEED(chunks, r->err, r->checkpoint->path);
    FC_TRY(describe_joined(r, v, blocks, shards, t));
    t->chunks = chunks;
    for (int64_t i = 0; i < blocks * shards && !fc_is_empty(v->ndim, v->sizes); i++) {
        int64_t block = i / shards, shard = i % shards;
        if (!gated) {
            FC_TRY(add_shard_chunk(r, t, chunks, values[i], block, 0, size, shard * size));
            continue;
        }
        FC_TRY(add_shard_chunk(r, t, chunks, values[i], block, 0, half, shard * half));
        FC_TRY(add_shard_chunk(r, t, chunks, values[i], block, half, half, (shards + shard) * half));
    }
    return set_placements(r, t, v, sharding);
}

/* Keeps the value of one rank as a tensor or object of its own. */
static fc_code keep_value(joiner *j, const fc_mg_value *v, const char *name, const fc_path *path) {
    fc_mg_value copy = *v, *one = &copy;
    fc_tensor *made = &j->made[v - j->r->values];
    const fc_mg_sharding whole = {MG_COPY, 0};
    copy.sharding = whole;
    copy.name = name;
    copy.path = *path;
    if (v->extent) {
        return make_tensor(j->r, &one, 1, 1, &whole, made);
    }
    *made = (fc_tensor){.name = name, .path = *path};
    return v->refusal
               ? fc_torch_refused_tensor(v->refusal, FC_HINT_NONE, v->file, j->r->checkpoint->arena, made, j->r->err)
               : fc_torch_object_tensor(v->object, v->file, j->r->checkpoint->arena, made, j->r->err);
}

/* ---- values that are not joined ---- */

/* Appends the rank to the name of a value that differs from that of the first rank. */
static fc_code keep_for_rank(joiner *j, const fc_mg_value *v) {
    fc_arena *arena = j->r->checkpoint->arena;
    const char *suffix = fc_arena_printf(arena, ".%s", j->r->grid.names[v->file]), *name = v->name;
    fc_path path = v->path;
    return suffix && fc_path_add_suffix(arena, suffix, &name, &path) ? keep_value(j, v, name, &path)
                                                                     : fc_mg_no_memory(j->r);
}

static fc_code join_loose(joiner *j, const group *g) {
    FC_TRY(keep_value(j, g->values[0], g->values[0]->name, &g->values[0]->path));
    for (size_t i = 1; i < g->count; i++) {
        bool same = false;
        FC_TRY(compare_values(j->r, g->values[0], g->values[i], &same));
        if (!same) {
            FC_TRY(keep_for_rank(j, g->values[i]));
        }
    }
    return FC_OK;
}

/* ---- parameters ---- */

static fc_code fail_missing(const fc_mg_reader *r, const fc_mg_value *first, uint32_t file, bool twice) {
    if (r->unnamed && !twice && strncmp(first->name, "model.", 6) != 0) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: the states of its optimizer have no names, unlike those of %s: %s",
                       fc_mg_file(r, r->unnamed_file), fc_mg_file(r, first->file), r->unnamed);
    }
    return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s %s", fc_mg_file(r, file), first->name,
                   twice ? "appears twice" : "is missing; other ranks of its stage have it");
}

/* Checks the values of one stage, from values[0] on: each rank that should hold the tensor must have it once. `*used`
 * is their number. */
static fc_code check_stage(const fc_mg_reader *r, fc_mg_value *const *values, size_t count, size_t *used) {
    const fc_mg_grid *grid = &r->grid;
    const fc_mg_place *first = place_of(r, values[0]);
    size_t i = 0;
    uint32_t file = (uint32_t)(first - grid->places);
    while (file > 0 && grid->places[file - 1].stage == first->stage) {
        file--;
    }
    for (; file < grid->count && grid->places[file].stage == first->stage; file++) {
        bool other = values[0]->expert && values[0]->grouped == 0 && grid->places[file].expert != first->expert;
        if (!other && (i == count || values[i]->file != file)) {
            bool twice = i > 0 && i < count && values[i]->file < file;
            return fail_missing(r, values[0], twice ? values[i]->file : file, twice);
        }
        i += !other;
    }
    *used = i;
    if (i < count && place_of(r, values[i])->stage == first->stage) {
        return fail_missing(r, values[0], values[i]->file, true);
    }
    return FC_OK;
}

static fc_code check_group(const fc_mg_reader *r, const group *g) {
    const fc_mg_value *first = g->values[0];
    for (size_t i = 0; i < g->count; i++) {
        const fc_mg_value *v = g->values[i];
        if (!v->extent || !v->shared || !same_shape(first, v) || v->grouped != first->grouped) {
            return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: its dtype or shape differs from that in %s",
                           fc_mg_file(r, v->file), first->name, fc_mg_file(r, first->file));
        }
    }
    /* Of the ranks with the same state of a distributed optimizer, only one saves it, so its files are not checked. */
    for (size_t i = 0, used = 0; i < g->count && first->file < r->grid.count; i += used) {
        FC_TRY(check_stage(r, g->values + i, g->count - i, &used));
    }
    return FC_OK;
}

/* Copies should be equal. If no rule says that the values are copies and they differ, they cannot be joined. */
static fc_code check_copy(const fc_mg_reader *r, const fc_mg_value *a, const fc_mg_value *b, bool *differ) {
    bool same;
    FC_TRY(compare_values(r, a, b, &same));
    if (!same && a->sharding.rule == MG_UNKNOWN) {
        return fc_fail(r->err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s: it differs from that in %s, and the dimension along which Megatron shards "
                       "it is unknown; give the path of one rank's file, or save with Megatron's --ckpt-format "
                       "torch_dist",
                       fc_mg_file(r, b->file), a->name, fc_mg_file(r, a->file));
    }
    *differ |= !same;
    return FC_OK;
}

/* Assigns the values to the shards of the tensor. Several values of one shard are copies, including those that a later
 * stage has under the same name: the tied embedding. */
static fc_code fill_cells(joiner *j, const group *g, bool *differ) {
    const fc_mg_reader *r = j->r;
    fc_mg_value *first = g->values[0];
    size_t shards = (size_t)shards_of(r, first), ncells = shards * (size_t)blocks_of(r, first);
    memset(j->cells, 0, ncells * sizeof *j->cells);
    for (size_t i = 0; i < g->count; i++) {
        const fc_mg_place *p = place_of(r, g->values[i]);
        size_t block = first->grouped > 0 ? (size_t)p->expert : 0;
        fc_mg_value **cell = &j->cells[block * shards + (size_t)p->tensor % shards];
        if (*cell) {
            FC_TRY(check_copy(r, *cell, g->values[i], differ));
        } else {
            *cell = g->values[i];
        }
    }
    for (size_t i = 0; i < ncells; i++) {
        if (!j->cells[i]) {
            return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: shard %zu of %zu is missing from all files",
                           r->checkpoint->path, first->name, i % shards + 1, shards);
        }
    }
    return FC_OK;
}

static fc_code join_shared(joiner *j, const group *g) {
    fc_mg_reader *r = j->r;
    const fc_mg_value *first = g->values[0];
    fc_mg_sharding sharding = first->sharding;
    bool differ = false, is_sharded = sharding.rule == MG_SHARD || sharding.rule == MG_GATED;
    int64_t shards = shards_of(r, first);
    FC_TRY(check_group(r, g));
    if (is_sharded && sharding.dim >= first->ndim) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: tensor %.256s: it has too few dimensions to be sharded along dimension %d",
                       fc_mg_file(r, first->file), first->name, sharding.dim);
    }
    FC_TRY(fill_cells(j, g, &differ));
    for (int64_t i = 1; !is_sharded && i < shards; i++) {
        FC_TRY(check_copy(r, j->cells[0], j->cells[i], &differ));
    }
    if (differ) {
        r->differing = r->differing ? r->differing : first->name;
        r->ndiffering++;
    }
    return make_tensor(r, j->cells, blocks_of(r, first), is_sharded ? shards : 1, &sharding,
                       &j->made[first - r->values]);
}

/* ---- all tensors ---- */

static fc_code join_groups(joiner *j, fc_mg_value **sorted) {
    size_t n = j->r->nvalues;
    for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        bool shared = sorted[i]->shared;
        while (end < n && strcmp(sorted[end]->name, sorted[i]->name) == 0) {
            shared = shared || sorted[end]->shared;
            end++;
        }
        const group g = {sorted + i, end - i};
        FC_TRY(shared ? join_shared(j, &g) : join_loose(j, &g));
        i = end;
    }
    return FC_OK;
}

/* Lists the tensors in the order of their first values. */
static fc_code list_tensors(const joiner *j) {
    fc_checkpoint *checkpoint = j->r->checkpoint;
    size_t count = 0;
    for (size_t i = 0; i < j->r->nvalues; i++) {
        if (j->made[i].name) {
            j->made[count++] = j->made[i];
        }
    }
    fc_tensor *tensors = fc_arena_copy(checkpoint->arena, j->made, count, sizeof *tensors);
    const char *name;
    FC_NEED(tensors, j->r->err, j->r->checkpoint->path);
    FC_TRY(fc_find_same_name(tensors, count, &name, j->r->err));
    if (name) {
        return fc_fail(j->r->err, FC_EUNSUPPORTED, "%s: the name %.256s appears twice", checkpoint->path, name);
    }
    checkpoint->tensors = tensors;
    checkpoint->ntensors = count;
    if (j->r->grid.tp > 1) {
        checkpoint->mesh = (fc_mesh){.ndim = 1, .sizes = {j->r->grid.tp}, .names = {"tp"}};
    }
    return FC_OK;
}

fc_code fc_mg_join(fc_mg_reader *r) {
    joiner j = {.r = r};
    fc_mg_value **sorted = fc_list_named(r->values, r->nvalues, sizeof *r->values);
    j.made = calloc(r->nvalues + 1, sizeof *j.made);
    const int64_t dense = r->grid.tp, experts = r->grid.expert_tp * r->grid.ep;
    j.cells = malloc((size_t)(dense > experts ? dense : experts) * sizeof *j.cells);
    fc_code rc;
    FC_TRY_GOTO(sorted && j.made && j.cells ? FC_OK : fc_mg_no_memory(r), rc, out);
    FC_TRY_GOTO(join_groups(&j, sorted), rc, out);
    rc = list_tensors(&j);
out:
    free(sorted);
    free(j.made);
    free(j.cells);
    return rc;
}
