/*
 * Merges the ranks' leaves into one checkpoint. Each leaf has a box (from a DTensor's placements, a ShardedTensor's
 * metadata or our own layout record). Equal boxes of several ranks become one chunk, that of the lowest rank.
 *
 * A plain tensor is a copy that every rank has; the CRCs or bytes of all copies must be equal. A value that is not a
 * tensor and differs between ranks is kept once per rank.
 */
#include "pt/merge.h"

#include "base/checked.h"
#include "base/grow.h"
#include "checkpoint/path.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/try.h"
#include "pt/sharding.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Copies the name, because names of leaves live only while their file is read. */
static bool keep_name(const fc_pt_builder *m, fc_pt_value *v) {
    fc_arena *arena = m->checkpoint->arena;
    const fc_path path = v->path;
    v->name = fc_arena_strndup(arena, v->name, strlen(v->name));
    return v->name && fc_path_copy(arena, &path, &v->path);
}

static fc_pt_value *find_value(const fc_pt_builder *m, const char *name) {
    const size_t at = fc_name_table_find(m->names, name, strlen(name));
    return at == FC_NO_NAME ? NULL : &m->values[at];
}

/* Finds the value called `name`, or makes it and sets `*made`. */
static fc_pt_value *value_of(fc_pt_builder *m, const char *name, const fc_path *path, bool *made) {
    fc_pt_value *found = find_value(m, name);
    *made = found == NULL;
    if (found) {
        return found;
    }
    if (!fc_grow(&m->values, &m->capacity, m->count + 1, sizeof *m->values)) {
        return NULL;
    }
    fc_pt_value *v = &m->values[m->count];
    *v = (fc_pt_value){.name = name, .path = *path};
    if (!keep_name(m, v) || fc_name_table_put(m->names, v->name, strlen(name), m->count) == FC_NO_NAME) {
        return NULL;
    }
    m->count++;
    return v;
}

/* ---- objects ---- */

/* Adds an object that differs from rank 0's under a name of the rank. */
static fc_code add_rank_object(fc_pt_builder *m, const torch_leaf *leaf, fc_pt_value **out) {
    const char *name = leaf->name;
    fc_path path = leaf->path;
    char suffix[32];
    bool made;
    snprintf(suffix, sizeof suffix, ".rank_%" PRId64, m->rank);
    *out = fc_path_add_suffix(m->scratch, suffix, &name, &path) ? value_of(m, name, &path, &made) : NULL;
    FC_NEED(*out, m->err, m->checkpoint->path);
    return made ? FC_OK
                : fc_fail(m->err, FC_EUNSUPPORTED,
                          "the ranks have different values, and the name %.256s for one of them is already in use",
                          name);
}

static fc_code merge_object(fc_pt_builder *m, const torch_leaf *leaf) {
    torch_object *object = NULL;
    bool made;
    fc_pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    FC_NEED(v, m->err, m->checkpoint->path);
    if (fc_pt_is_group(m, &leaf->path)) {
        v->file = made ? m->f->index : v->file;
        return made ? fc_pt_name_group(m, &v->object) : FC_OK;
    }
    FC_TRY(fc_torch_object_new(m->f, leaf->v, made ? m->checkpoint->arena : m->scratch, &object, m->err));
    if (!made && v->object && fc_torch_same_object(v->object, object)) {
        return FC_OK;
    }
    if (!made) {
        FC_TRY(add_rank_object(m, leaf, &v));
        FC_TRY(fc_torch_object_new(m->f, leaf->v, m->checkpoint->arena, &object, m->err));
    }
    v->object = object;
    v->file = m->f->index;
    return FC_OK;
}

/* ---- tensors ---- */

static bool same_shape(const fc_pt_value *v, const fc_pt_shard *shard) {
    return fc_same_sizes(v->ndim, v->shape, shard->ndim, shard->shape);
}

static fc_code describe_value(fc_pt_builder *m, fc_pt_value *v, const fc_pt_shard *shard, fc_dtype dtype) {
    int64_t *shape = fc_arena_copy(m->checkpoint->arena, shard->shape, (size_t)shard->ndim, sizeof *shape);
    v->placements =
        fc_arena_copy(m->checkpoint->arena, shard->placements, (size_t)shard->mesh.ndim, sizeof *v->placements);
    FC_NEED(shape && v->placements, m->err, m->checkpoint->path);
    v->dtype = dtype;
    v->ndim = shard->ndim;
    v->shape = shape;
    v->mesh = shard->mesh;
    return FC_OK;
}

static bool has_box(const fc_pt_builder *m, const fc_pt_value *v, const fc_pt_shard *shard) {
    int64_t dims[2 * FC_MAX_DIMS];
    memcpy(dims, shard->offsets, (size_t)v->ndim * sizeof *dims);
    memcpy(dims + v->ndim, shard->sizes, (size_t)v->ndim * sizeof *dims);
    return fc_name_table_find_child(m->boxes, (uint64_t)(v - m->values), dims, 2 * (size_t)v->ndim * sizeof *dims) !=
           FC_NO_NAME;
}

static fc_code add_value_chunk(fc_pt_builder *m, fc_pt_value *v, const fc_pt_shard *shard, const torch_extent *extent) {
    int64_t *dims = fc_arena_calloc(m->checkpoint->arena, 2 * (size_t)v->ndim, sizeof *dims);
    FC_NEED(dims && fc_grow(&v->chunks, &v->capacity, v->nchunks + 1, sizeof *v->chunks), m->err, m->checkpoint->path);
    memcpy(dims, shard->offsets, (size_t)v->ndim * sizeof *dims);
    memcpy(dims + v->ndim, shard->sizes, (size_t)v->ndim * sizeof *dims);
    FC_NEED(fc_name_table_put_child(m->boxes, (uint64_t)(v - m->values), dims, 2 * (size_t)v->ndim * sizeof *dims,
                                    v->nchunks) != FC_NO_NAME,
            m->err, m->checkpoint->path);
    v->chunks[v->nchunks++] = fc_torch_chunk(dims, extent, (uint32_t)m->rank);
    return FC_OK;
}

/* Any tensor without elements fits an empty shard: FSDP2 saves [0, 0] where the placements say [2, 0]. */
static fc_code check_local(const fc_pt_builder *m, const fc_pt_shard *shard, const fc_torch_tensor *t) {
    int64_t elements;
    bool same = t->ndim == shard->ndim;
    if (same && fc_is_empty(shard->ndim, shard->sizes) && fc_numel(t->ndim, t->sizes, &elements) && elements == 0) {
        return FC_OK;
    }
    for (int i = 0; same && i < t->ndim; i++) {
        same = shard->within
                   ? fc_range_within((uint64_t)shard->inside[i], (uint64_t)shard->sizes[i], (uint64_t)t->sizes[i])
                   : t->sizes[i] == shard->sizes[i] + (i == 0 ? shard->padding : 0);
    }
    return same ? FC_OK
                : fc_fail(m->err, FC_ECORRUPT,
                          "%s: its local tensor does not have the shape that its placements give the rank", m->f->path);
}

/* Adds a rank's shard of the value called leaf->name. */
static fc_code add_shard(fc_pt_builder *m, const torch_leaf *leaf, const fc_pt_shard *shard) {
    fc_torch_tensor t = {0};
    torch_extent *extent = NULL;
    bool made;
    if (!shard->local) { /* the rank's shard is empty; another rank has the dtype */
        return FC_OK;
    }
    fc_pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    FC_NEED(v, m->err, m->checkpoint->path);
    /* A box that another rank's file also contains needs no chunk. */
    bool wanted = made || (!v->object && same_shape(v, shard) && !fc_is_empty(shard->ndim, shard->sizes) &&
                           !has_box(m, v, shard));
    FC_TRY_CONTEXT(
        fc_torch_find_extent(m->f, shard->local, &t, wanted ? m->checkpoint->arena : m->scratch, &extent, m->err),
        m->err, "%s", m->f->path);
    FC_TRY(check_local(m, shard, &t));
    for (int i = 0; i < t.ndim && shard->within; i++) { /* the tensor fits its file, so this does not overflow */
        extent->first += (uint64_t)shard->inside[i] * (uint64_t)extent->strides[i] * fc_dtype_size(t.dtype);
    }
    if (made) {
        FC_TRY(describe_value(m, v, shard, t.dtype));
    }
    if (v->object || v->plain || v->dtype != t.dtype || !same_shape(v, shard)) {
        return fc_fail(m->err, FC_ECORRUPT, "%s: its dtype or shape differs from that of earlier ranks", m->f->path);
    }
    return wanted && !fc_is_empty(shard->ndim, shard->sizes) ? add_value_chunk(m, v, shard, extent) : FC_OK;
}

/* Whether a plain tensor is a view of one of the file's flat parameters. */
static bool is_flat_view(const fc_pt_builder *m, const fc_torch_tensor *t, const torch_extent *extent) {
    for (size_t i = 0; i < m->nflat && t->ndim == 1; i++) {
        if (m->flat[i] == extent->record.offset) {
            return true;
        }
    }
    return false;
}

/* Checks that every rank had a shard, and that these are the shards of torch.chunk. */
static fc_code end_tp_shards(const fc_pt_builder *m, fc_pt_value *v, int64_t ranks) {
    const int dim = v->placements[0].dim;
    bool regular = true;
    if (v->shards != ranks) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: %.256s: only %" PRId64 " of %" PRId64
                       " ranks' files contain it, but according to the plan tensor parallelism sharded it",
                       m->directory, v->name, v->shards, ranks);
    }
    v->mesh.sizes[0] = ranks;
    for (size_t i = 0; i < v->nchunks && regular; i++) {
        int64_t coordinate = v->chunks[i].rank, offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
        regular =
            fc_local_box(v->ndim, v->shape, &v->mesh, v->placements, &coordinate, offsets, sizes, NULL) == FC_OK &&
            v->chunks[i].dims[dim] == offsets[dim] && v->chunks[i].dims[v->ndim + dim] == sizes[dim];
    }
    v->mesh.ndim = regular ? v->mesh.ndim : 0;
    return FC_OK;
}

/* Appends this rank's shard to those of the lower ranks along `dim`. */
static fc_code extend_along(const fc_pt_builder *m, fc_pt_value *v, const fc_torch_tensor *t, int dim,
                            fc_pt_shard *shard) {
    shard->offsets[dim] = v->ndim == t->ndim ? v->shape[dim] : 0;
    shard->shape[dim] = shard->offsets[dim];
    bool fits = v->dtype == t->dtype && same_shape(v, shard);
    if (!fits || !fc_add_i64(v->shape[dim], t->sizes[dim], &v->shape[dim]) ||
        !fc_torch_shape_fits(v->dtype, v->ndim, v->shape)) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: its dtype or shape does not match those of earlier ranks, with which it is sharded along "
                       "dimension %d according to the plan",
                       m->f->path, dim);
    }
    return FC_OK;
}

/* Adds a plain tensor that is sharded along `dim` according to the plan: appends the rank's shard. */
static fc_code add_tp_shard(fc_pt_builder *m, const torch_leaf *leaf, int dim) {
    fc_torch_tensor t = {0};
    torch_extent *extent = NULL;
    bool made;
    fc_pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    FC_NEED(v, m->err, m->checkpoint->path);
    if (made ? m->rank > 0 : v->shards == 0 || v->shards != m->rank) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: not all files of lower ranks have this tensor, but according to the plan tensor "
                       "parallelism sharded it",
                       m->f->path);
    }
    FC_TRY_CONTEXT(fc_torch_find_extent(m->f, leaf->v, &t, m->checkpoint->arena, &extent, m->err), m->err, "%s",
                   m->f->path);
    fc_pt_shard shard = {.ndim = t.ndim,
                         .mesh = {.ndim = 1, .sizes = {1}, .names = {"tp"}},
                         .placements = {{.kind = FC_SHARD, .dim = dim}}};
    memcpy(shard.shape, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    memcpy(shard.sizes, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    if (made) {
        FC_TRY(describe_value(m, v, &shard, t.dtype));
        m->joined++;
    } else {
        FC_TRY(extend_along(m, v, &t, dim, &shard));
    }
    v->shards = m->rank + 1;
    return fc_is_empty(shard.ndim, shard.sizes) ? FC_OK : add_value_chunk(m, v, &shard, extent);
}

/* Whether a value is the state of a parameter that its optimizer only numbers, and one-dimensional: a shard of one of
   FSDP1's flat parameters. */
static bool is_flat_state(const fc_pt_value *v) {
    const fc_path_element *e = v->path.count >= 3 ? &v->path.elements[v->path.count - 3] : NULL;
    return e && v->ndim == 1 && strcmp(e[0].key, "state") == 0 && e[1].is_number;
}

fc_code fc_pt_check_shards(fc_pt_builder *m, size_t first, int64_t ranks) {
    for (size_t i = first; i < m->count; i++) {
        fc_pt_value *v = &m->values[i];
        FC_TRY(v->shards > 0 ? end_tp_shards(m, v, ranks) : FC_OK);
        if (v->plain && !v->view && !v->refusal && is_flat_state(v) && v->copies < ranks) {
            v->refusal =
                "optimizer state under a number, which not every rank has, as that of FSDP1's flat parameters: "
                "save FSDP.optim_state_dict(model, optimizer), or convert the model alone";
        }
    }
    return fc_pt_check_pieces(m, first);
}

static fc_code refuse_unequal(const fc_pt_builder *m, const fc_pt_value *v) {
    if (is_flat_state(v)) {
        return fc_fail(m->err, FC_EUNSUPPORTED,
                       "%s: optimizer state under a number, which differs between ranks, as that of FSDP1's flat "
                       "parameters, and no model in one folder with it has flat parameters of these sizes, one for the "
                       "root and one for each layer, or parameters of which these are parts: save "
                       "FSDP.optim_state_dict(model, optimizer), or convert the "
                       "model alone",
                       m->f->path);
    }
    return fc_advise(
        m->err,
        fc_fail(m->err, FC_EUNSUPPORTED,
                "%s: this plain tensor differs from that of rank 0 and is not a copy, and no file says how "
                "the ranks' shards fit together",
                m->f->path),
        FC_HINT_SHARDED_BY_TP, NULL);
}

/* Compares a plain tensor with that of rank 0, from which `v` was made. */
static fc_code compare_plain(const fc_pt_builder *m, const fc_pt_value *v, const fc_pt_shard *shard, fc_dtype dtype,
                             const torch_extent *extent) {
    bool same = false;
    if (is_flat_state(v) && shard->ndim == 1 && !same_shape(v, shard)) {
        return refuse_unequal(m, v);
    }
    if (v->object || !v->plain || v->dtype != dtype || !same_shape(v, shard)) {
        return fc_advise(m->err,
                         fc_fail(m->err, FC_EUNSUPPORTED,
                                 "%s: a plain tensor whose dtype or shape differs between ranks, and the files do not "
                                 "say how the ranks' shards are combined",
                                 m->f->path),
                         FC_HINT_SHARDED_BY_TP, NULL);
    }
    if (v->nchunks == 0) {
        return FC_OK;
    }
    const torch_extent *first = v->chunks[0].data;
    FC_TRY(fc_torch_same_extent(m->checkpoint, v->dtype, v->ndim, v->shape, first, extent, &same, m->err));
    return same ? FC_OK : refuse_unequal(m, v);
}

/* Adds a plain tensor without a layout. It must be equal on all ranks, or they cannot be merged. */
static fc_code add_plain(fc_pt_builder *m, const torch_leaf *leaf) {
    fc_torch_tensor t = {0};
    torch_extent *extent = NULL;
    fc_pt_shard shard = {0};
    bool made;
    fc_pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    FC_NEED(v, m->err, m->checkpoint->path);
    FC_TRY_CONTEXT(fc_torch_find_extent(m->f, leaf->v, &t, made ? m->checkpoint->arena : m->scratch, &extent, m->err),
                   m->err, "%s", m->f->path);
    v->copies++;
    v->file = made ? m->f->index : v->file;
    if (is_flat_view(m, &t, extent) && (made || (v->plain && v->ndim == 1))) {
        v->plain = v->view = m->checkpoint->omits_views = true;
        v->ndim = 1;
        return FC_OK;
    }
    if (v->view && t.ndim == 1) {
        return FC_OK; /* the rank has an empty shard */
    }
    shard.ndim = t.ndim;
    memcpy(shard.shape, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    memcpy(shard.sizes, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    if (!made) {
        return compare_plain(m, v, &shard, t.dtype, extent);
    }
    v->plain = true;
    FC_TRY(describe_value(m, v, &shard, t.dtype));
    return fc_is_empty(shard.ndim, shard.sizes) ? FC_OK : add_value_chunk(m, v, &shard, extent);
}

static fc_code add_sharded(fc_pt_builder *m, const torch_leaf *leaf) {
    fc_pt_shard shard;
    size_t n = fc_pt_sharded_count(m->f, leaf->v);
    for (size_t i = 0; i < n; i++) {
        FC_TRY(fc_pt_sharded_shard(m->f, leaf->v, i, &shard, m->err));
        FC_TRY(add_shard(m, leaf, &shard));
    }
    return FC_OK;
}

/* Finds the dimension along which tensor parallelism sharded according to the plan, or -1. */
static fc_code find_tp_dim(const fc_pt_builder *m, const torch_leaf *leaf, int *dim) {
    fc_torch_tensor t = {0};
    fc_tp_style style;
    FC_TRY_CONTEXT(fc_torch_tensor_decode(m->f->p, leaf->v, &t, m->err), m->err, "%s", m->f->path);
    *dim = fc_tp_plan_dim(m->tp_plan, leaf->name, t.ndim, &style);
    return FC_OK;
}

static bool is_everywhere(const fc_pt_shard *shard) {
    bool all = shard->mesh.ndim > 0;
    for (int i = 0; i < shard->mesh.ndim; i++) {
        all = all && shard->placements[i].kind == FC_REPLICATE;
    }
    return all;
}

/* Adds a tensor whose boxes metadata.pkl lists. A plain tensor that every rank saved with torch.save was listed without
 * anybody comparing the ranks. */
static fc_code add_described(fc_pt_builder *m, const torch_leaf *leaf, fc_pv how) {
    fc_pt_shard shard;
    const size_t n = fc_pt_sharding_count(m->sharding, how);
    for (size_t i = 0; i < n; i++) {
        FC_TRY(fc_pt_sharding_shard(m->sharding, how, m->rank, i, &shard, m->err));
        if (!m->f->described && is_everywhere(&shard)) {
            return add_plain(m, leaf);
        }
        shard.local = leaf->v;
        FC_TRY(add_shard(m, leaf, &shard));
    }
    return FC_OK;
}

/* Checks that a DTensor is the one of this rank: a number in the name of a file may be that of a step. */
static fc_code check_coordinate(const fc_pt_builder *m, const fc_pt_shard *shard) {
    int64_t own[FC_MAX_MESH_DIMS];
    if (!m->set->numbered || !shard->in_mesh || fc_mesh_ranks(&shard->mesh) != m->set->ranks) {
        return FC_OK;
    }
    fc_mesh_coordinate(&shard->mesh, m->rank, own);
    return memcmp(own, shard->coordinate, (size_t)shard->mesh.ndim * sizeof *own) == 0
               ? FC_OK
               : fc_fail(m->err, FC_ECORRUPT,
                         "%s: its DTensors are not those of rank %" PRId64
                         ": the file was renamed, or the number in its name is that of a step: give the path of a "
                         "directory with the files of one step, called model_<rank>.pt",
                         m->f->path, m->rank);
}

/* Compares the box of a DTensor with what metadata.pkl says of it. */
static fc_code check_described(const fc_pt_builder *m, const torch_leaf *leaf, const fc_pt_shard *own) {
    fc_pt_shard said;
    const fc_pv how = m->sharding && m->set->listed
                          ? fc_pt_sharding_find(m->sharding, m->set->name, leaf->name + m->item_name, m->rank)
                          : 0;
    if (!how || fc_pt_sharding_count(m->sharding, how) != 1) {
        return FC_OK;
    }
    FC_TRY(fc_pt_sharding_shard(m->sharding, how, m->rank, 0, &said, m->err));
    const bool same =
        fc_same_sizes(own->ndim, own->shape, said.ndim, said.shape) &&
        fc_same_sizes(own->ndim, own->sizes, said.ndim, said.sizes) &&
        (fc_is_empty(own->ndim, own->sizes) || fc_same_sizes(own->ndim, own->offsets, said.ndim, said.offsets));
    return same ? FC_OK
                : fc_fail(m->err, FC_ECORRUPT,
                          "%s: the file says another part of the tensor than %s: they are of two saves", m->f->path,
                          m->sharding->path);
}

/* A tensor of the rank: what it is follows from the optimizer's numbers, our layout record, or the TP plan. */
static fc_code merge_tensor(fc_pt_builder *m, const torch_leaf *leaf) {
    fc_pt_shard shard;
    if (m->numbered) {
        bool is = false;
        FC_TRY(fc_pt_state_shard(m, leaf, &shard, &is, m->err));
        if (is) {
            return add_shard(m, leaf, &shard);
        }
    }
    if (m->layout->root) {
        FC_TRY(fc_pt_layout_shard(m->layout, m->f, m->rank, leaf->name, leaf->v, &shard, m->err));
        if (shard.ndim >= 0) {
            return add_shard(m, leaf, &shard);
        }
    }
    fc_pv how = m->sharding && m->set->listed
                    ? fc_pt_sharding_find(m->sharding, m->set->name, leaf->name + m->item_name, m->rank)
                    : 0;
    if (how) {
        return add_described(m, leaf, how);
    }
    int dim = -1;
    if (m->tp_plan) {
        FC_TRY(find_tp_dim(m, leaf, &dim));
    }
    return dim >= 0 ? add_tp_shard(m, leaf, dim) : add_plain(m, leaf);
}

static fc_code merge_leaf(fc_pt_builder *m, const torch_leaf *leaf) {
    fc_pt_shard shard;
    switch (leaf->kind) {
    case TORCH_OBJECT:
        return merge_object(m, leaf);
    case TORCH_DTENSOR:
        FC_TRY(fc_pt_dtensor_shard(m->f, leaf->v, &shard, m->err));
        FC_TRY(check_coordinate(m, &shard));
        FC_TRY(check_described(m, leaf, &shard));
        return add_shard(m, leaf, &shard);
    case TORCH_SHARDED_TENSOR:
        return add_sharded(m, leaf);
    default:
        return merge_tensor(m, leaf);
    }
}

/* Makes the value of a leaf unreadable, for the reason in m->err. */
static fc_code refuse_value(fc_pt_builder *m, const torch_leaf *leaf) {
    bool made;
    fc_pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    FC_NEED(v, m->err, m->checkpoint->path);
    v->refusal = fc_arena_strndup(m->checkpoint->arena, m->err->message, strlen(m->err->message));
    v->hint = m->err->hint;
    v->file = m->f->index;
    v->mesh.ndim = 0;
    v->shards = 0;
    v->view = false;
    return v->refusal ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

fc_code fc_pt_merge_leaf(fc_pt_builder *m, const torch_leaf *leaf) {
    const fc_pt_value *v = find_value(m, leaf->name);
    if (v && v->refusal) {
        return FC_OK;
    }
    const fc_code rc = merge_leaf(m, leaf);
    return rc == FC_EUNSUPPORTED ? refuse_value(m, leaf) : rc;
}
