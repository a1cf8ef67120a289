/*
 * Putting ranks' leaves together: each says which box of the whole it is (a DTensor's placements, a ShardedTensor's
 * metadata, our own layout record), and equal boxes of several ranks are one chunk, the lowest rank's.
 *
 * A plain tensor is a copy that every rank has, which is not taken on trust: the copies' CRCs (or bytes) must agree.
 * A value that is no tensor and differs from rank to rank is kept for each of them.
 */
#include "pt/merge.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/try.h"
#include "derived/flat_units.h"
#include "fsdpckpt/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static uint32_t *find_slot(const pt_merger *m, uint32_t *slots, size_t nslots, const char *name) {
    size_t i = (size_t)XXH3_64bits(name, strlen(name)) & (nslots - 1);
    while (slots[i] && strcmp(m->values[slots[i] - 1].name, name) != 0) {
        i = (i + 1) & (nslots - 1);
    }
    return &slots[i];
}

static bool grow_slots(pt_merger *m) {
    size_t nslots = m->nslots ? m->nslots * 2 : 1024;
    uint32_t *slots = calloc(nslots, sizeof *slots);
    if (!slots) {
        return false;
    }
    for (size_t i = 0; i < m->count; i++) {
        *find_slot(m, slots, nslots, m->values[i].name) = (uint32_t)i + 1;
    }
    free(m->slots);
    m->slots = slots;
    m->nslots = nslots;
    return true;
}

/* The names of later ranks' leaves live as long as their file is read. */
static bool keep_name(const pt_merger *m, pt_value *v) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, v->path.count, sizeof *elements);
    v->name = fc_arena_strndup(arena, v->name, strlen(v->name));
    for (size_t i = 0; elements && i < v->path.count; i++) {
        elements[i] = v->path.elements[i];
        elements[i].key = fc_arena_strndup(arena, elements[i].key, strlen(elements[i].key));
        elements = elements[i].key ? elements : NULL;
    }
    v->path.elements = elements;
    return elements && v->name;
}

/* The value called `name`, made if it is not there (`*made`). */
static pt_value *value_of(pt_merger *m, const char *name, const fc_path *path, bool *made) {
    if ((m->count + 1) * 2 >= m->nslots && !grow_slots(m)) {
        return NULL;
    }
    uint32_t *slot = find_slot(m, m->slots, m->nslots, name);
    *made = *slot == 0;
    if (*slot) {
        return &m->values[*slot - 1];
    }
    if (!fc_grow(&m->values, &m->capacity, m->count + 1, sizeof *m->values)) {
        return NULL;
    }
    pt_value *v = &m->values[m->count];
    *v = (pt_value){.name = name, .path = *path};
    if (m->rank > 0 && !keep_name(m, v)) {
        return NULL;
    }
    *slot = (uint32_t)++m->count;
    return v;
}

/* ---- objects ---- */

/* The name and path of what another rank has under a name that is taken: "lr.rank_3". */
static fc_code rank_path(pt_merger *m, const torch_leaf *leaf, const char **name, fc_path *path) {
    fc_arena *arena = m->checkpoint->arena;
    fc_path_element *elements = fc_arena_calloc(arena, leaf->path.count, sizeof *elements);
    *name = fc_arena_printf(arena, "%s.rank_%" PRId64, leaf->name, m->rank);
    if (!elements || !*name) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    memcpy(elements, leaf->path.elements, leaf->path.count * sizeof *elements);
    fc_path_element *last = &elements[leaf->path.count - 1];
    *last = (fc_path_element){.key = fc_arena_printf(arena, "%s.rank_%" PRId64, last->key, m->rank)};
    *path = (fc_path){elements, leaf->path.count};
    return last->key ? FC_OK : fc_no_memory(m->err, m->checkpoint->path);
}

static fc_code add_object(pt_merger *m, const torch_leaf *leaf) {
    torch_object *object = NULL;
    bool made;
    pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    fc_code rc = fc_torch_object_new(&m->f, leaf->v, made ? m->checkpoint->arena : m->scratch, &object, m->err);
    if (rc != FC_OK) {
        return rc;
    }
    if (!made && v->object && fc_torch_same_object(v->object, object)) {
        return FC_OK;
    }
    if (!made) {
        const char *name;
        fc_path path;
        rc = rank_path(m, leaf, &name, &path);
        v = rc == FC_OK ? value_of(m, name, &path, &made) : NULL;
        if (!v || !made) {
            return rc != FC_OK ? rc
                   : v ? fc_fail(m->err, FC_EUNSUPPORTED, "the ranks' values differ, and %.256s is another", name)
                       : fc_no_memory(m->err, m->checkpoint->path);
        }
        rc = fc_torch_object_new(&m->f, leaf->v, m->checkpoint->arena, &object, m->err);
    }
    v->object = object;
    v->file = m->f.index;
    return rc;
}

/* ---- tensors ---- */

static bool same_shape(const pt_value *v, const pt_shard *share) {
    return v->ndim == share->ndim && memcmp(v->shape, share->shape, (size_t)v->ndim * sizeof *v->shape) == 0;
}

static fc_code describe(pt_merger *m, pt_value *v, const pt_shard *share, fc_dtype dtype) {
    size_t bytes = (size_t)share->ndim * sizeof *v->shape;
    int64_t *shape = fc_arena_alloc(m->checkpoint->arena, bytes);
    v->placements = fc_arena_calloc(m->checkpoint->arena, (size_t)share->mesh.ndim, sizeof *v->placements);
    if (!shape || !v->placements) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    memcpy(shape, share->shape, bytes);
    memcpy(v->placements, share->placements, (size_t)share->mesh.ndim * sizeof *v->placements);
    v->dtype = dtype;
    v->ndim = share->ndim;
    v->shape = shape;
    v->mesh = share->mesh;
    return FC_OK;
}

static bool is_empty(const pt_shard *share) {
    for (int i = 0; i < share->ndim; i++) {
        if (share->sizes[i] == 0) {
            return true;
        }
    }
    return false;
}

static bool has_box(const pt_value *v, const pt_shard *share) {
    size_t bytes = (size_t)v->ndim * sizeof(int64_t);
    for (size_t i = 0; i < v->nchunks; i++) {
        const int64_t *dims = v->chunks[i].dims;
        if (memcmp(dims, share->offsets, bytes) == 0 && memcmp(dims + v->ndim, share->sizes, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static fc_code add_chunk(pt_merger *m, pt_value *v, const pt_shard *share, const torch_extent *piece) {
    int64_t *dims = fc_arena_calloc(m->checkpoint->arena, 2 * (size_t)v->ndim, sizeof *dims);
    if (!dims || !fc_grow(&v->chunks, &v->capacity, v->nchunks + 1, sizeof *v->chunks)) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    memcpy(dims, share->offsets, (size_t)v->ndim * sizeof *dims);
    memcpy(dims + v->ndim, share->sizes, (size_t)v->ndim * sizeof *dims);
    v->chunks[v->nchunks++] = (fc_chunk){.dims = dims,
                                         .offset = piece->record.offset,
                                         .length = piece->record.stored,
                                         .file = piece->record.file,
                                         .rank = (uint32_t)m->rank,
                                         .detail = (uint64_t)(uintptr_t)piece};
    return FC_OK;
}

static fc_code check_local(const pt_merger *m, const pt_shard *share, const fc_torch_tensor *t) {
    bool same = t->ndim == share->ndim;
    for (int i = 0; same && i < t->ndim; i++) {
        same = t->sizes[i] == share->sizes[i] + (i == 0 ? share->padding : 0);
    }
    return same ? FC_OK
                : fc_fail(m->err, FC_ECORRUPT, "%s: its local part has another shape than its placements give the rank",
                          m->f.path);
}

/* A rank's piece of the value called leaf->name. */
static fc_code add_share(pt_merger *m, const torch_leaf *leaf, const pt_shard *share) {
    fc_torch_tensor t = {0};
    torch_extent *piece = NULL;
    bool made;
    pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    if (!share->local) { /* the rank holds none of it; another will say more */
        m->count -= made;
        if (made) {
            *find_slot(m, m->slots, m->nslots, leaf->name) = 0;
        }
        return FC_OK;
    }
    /* Pieces that another rank's file has, too, need no place in the manifest. */
    bool wanted = made || (!v->object && same_shape(v, share) && !is_empty(share) && !has_box(v, share));
    fc_code rc =
        fc_torch_find_extent(&m->f, share->local, &t, wanted ? m->checkpoint->arena : m->scratch, &piece, m->err);
    rc = rc == FC_OK ? check_local(m, share, &t) : fc_context(m->err, rc, "%s", m->f.path);
    rc = rc == FC_OK && made ? describe(m, v, share, t.dtype) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    if (v->object || v->plain || v->dtype != t.dtype || !same_shape(v, share)) {
        return fc_fail(m->err, FC_ECORRUPT, "%s: its type or shape is not that of the ranks before", m->f.path);
    }
    return wanted && !is_empty(share) ? add_chunk(m, v, share, piece) : FC_OK;
}

/* Whether a plain tensor is a view of one of the file's flat parameters. */
static bool is_flat_view(const pt_merger *m, const fc_torch_tensor *t, const torch_extent *piece) {
    for (size_t i = 0; i < m->nflat && t->ndim == 1; i++) {
        if (m->flat[i] == piece->record.offset) {
            return true;
        }
    }
    return false;
}

/* Whether every rank had a part, and whether they are cut as torch.chunk does it. */
static fc_code end_parts(const pt_merger *m, pt_value *v, int64_t ranks) {
    const int dim = v->placements[0].dim;
    bool regular = true;
    if (v->parts != ranks) {
        return fc_fail(m->err, FC_ECORRUPT,
                       "%s: %.256s: %" PRId64 " of %" PRId64 " ranks' files have it, and tensor parallelism cut it, as "
                       "the plan says",
                       m->directory, v->name, v->parts, ranks);
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

fc_code fc_pt_check_parts(pt_merger *m, size_t first, int64_t ranks) {
    fc_code rc = FC_OK;
    for (size_t i = first; rc == FC_OK && i < m->count; i++) {
        rc = m->values[i].parts > 0 ? end_parts(m, &m->values[i], ranks) : rc;
    }
    return rc;
}

/* A plain tensor that the plan says is cut along `dim`: ranks' parts lie behind each other. */
static fc_code add_part(pt_merger *m, const torch_leaf *leaf, int dim) {
    fc_torch_tensor t = {0};
    torch_extent *piece = NULL;
    bool made;
    pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    fc_code rc = fc_torch_find_extent(&m->f, leaf->v, &t, m->checkpoint->arena, &piece, m->err);
    if (rc != FC_OK) {
        return fc_context(m->err, rc, "%s", m->f.path);
    }
    pt_shard share = {.ndim = t.ndim,
                      .mesh = {.ndim = 1, .sizes = {1}, .names = {"tp"}},
                      .placements = {{.kind = FC_SHARD, .dim = dim}}};
    memcpy(share.shape, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    memcpy(share.sizes, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    if (made) {
        rc = describe(m, v, &share, t.dtype);
        m->checkpoint->tp_joined++;
    } else {
        share.offsets[dim] = v->parts > 0 && v->ndim == t.ndim ? v->shape[dim] : 0;
        share.shape[dim] = share.offsets[dim];
        bool fits = v->parts == m->rank && v->dtype == t.dtype && same_shape(v, &share);
        if (!fits || !fc_add_i64(v->shape[dim], t.sizes[dim], &v->shape[dim]) ||
            !fc_torch_shape_fits(v->dtype, v->ndim, v->shape)) {
            return fc_fail(m->err, FC_ECORRUPT,
                           "%s: its part does not fit those of the ranks before, with which it would be cut along "
                           "dimension %d, as the plan says",
                           m->f.path, dim);
        }
    }
    v->parts = m->rank + 1;
    return rc == FC_OK && !is_empty(&share) ? add_chunk(m, v, &share, piece) : rc;
}

/* A plain tensor without a word about how it lies: the same on every rank, or it cannot be put together. */
static fc_code add_plain(pt_merger *m, const torch_leaf *leaf) {
    fc_torch_tensor t = {0};
    torch_extent *piece = NULL;
    pt_shard share = {0};
    bool made, same = false;
    pt_value *v = value_of(m, leaf->name, &leaf->path, &made);
    if (!v) {
        return fc_no_memory(m->err, m->checkpoint->path);
    }
    fc_code rc = fc_torch_find_extent(&m->f, leaf->v, &t, made ? m->checkpoint->arena : m->scratch, &piece, m->err);
    if (rc != FC_OK) {
        return fc_context(m->err, rc, "%s", m->f.path);
    }
    if (is_flat_view(m, &t, piece) && (made || (v->plain && v->ndim == 1))) {
        v->plain = v->view = m->checkpoint->flat_views = true;
        v->ndim = 1;
        return FC_OK;
    }
    if (v->view && t.ndim == 1) {
        return FC_OK; /* a rank that has nothing of it */
    }
    share.ndim = t.ndim;
    memcpy(share.shape, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    memcpy(share.sizes, t.sizes, (size_t)t.ndim * sizeof *t.sizes);
    if (made) {
        v->plain = true;
        rc = describe(m, v, &share, t.dtype);
        return rc == FC_OK && !is_empty(&share) ? add_chunk(m, v, &share, piece) : rc;
    }
    if (v->object || !v->plain || v->dtype != t.dtype || !same_shape(v, &share)) {
        return fc_fail(m->err, FC_EUNSUPPORTED,
                       "%s: a plain tensor whose type or shape is another on another rank: nothing says how the "
                       "ranks' parts fit together; if tensor parallelism cut it, consolidate with --tp-plan",
                       m->f.path);
    }
    if (v->nchunks == 0) {
        return FC_OK;
    }
    const torch_extent *first = (const torch_extent *)(uintptr_t)v->chunks[0].detail;
    rc = fc_torch_same_extent(m->checkpoint, v->dtype, v->ndim, v->shape, first, piece, &same, m->err);
    return rc != FC_OK || same ? rc
                               : fc_fail(m->err, FC_EUNSUPPORTED,
                                         "%s: a plain tensor that differs from that of rank 0: neither a copy, nor "
                                         "does anything say how the ranks' parts fit together; if tensor "
                                         "parallelism cut it, consolidate with --tp-plan",
                                         m->f.path);
}

static fc_code add_sharded(pt_merger *m, const torch_leaf *leaf) {
    pt_shard share;
    size_t n = fc_pt_sharded_count(&m->f, leaf->v);
    for (size_t i = 0; i < n; i++) {
        FC_TRY(fc_pt_sharded_shard(&m->f, leaf->v, i, &share, m->err));
        FC_TRY(add_share(m, leaf, &share));
    }
    return FC_OK;
}

/* The dimension that the plan says tensor parallelism cut, or -1. */
static fc_code find_cut(const pt_merger *m, const torch_leaf *leaf, int *dim) {
    fc_torch_tensor t = {0};
    fc_tp_style style;
    fc_code rc = fc_torch_tensor_decode(m->f.p, leaf->v, &t, m->err);
    *dim = rc == FC_OK ? fc_tp_plan_dim(m->tp_plan, leaf->name, t.ndim, &style) : -1;
    return rc == FC_OK ? rc : fc_context(m->err, rc, "%s", m->f.path);
}

fc_code fc_pt_merge_leaf(pt_merger *m, const torch_leaf *leaf) {
    pt_shard share;
    fc_code rc;
    switch (leaf->kind) {
    case TORCH_OBJECT:
        return add_object(m, leaf);
    case TORCH_DTENSOR:
        rc = fc_pt_dtensor_shard(&m->f, leaf->v, &share, m->err);
        return rc == FC_OK ? add_share(m, leaf, &share) : rc;
    case TORCH_SHARDED_TENSOR:
        return add_sharded(m, leaf);
    default:
        break;
    }
    if (m->numbered) {
        bool is = false;
        rc = fc_pt_state_shard(m, leaf, &share, &is, m->err);
        if (rc != FC_OK || is) {
            return rc == FC_OK ? add_share(m, leaf, &share) : rc;
        }
    }
    if (m->layout.root) {
        rc = fc_pt_layout_shard(&m->layout, &m->f, m->rank, leaf->name, leaf->v, &share, m->err);
        if (rc != FC_OK || share.ndim >= 0) {
            return rc == FC_OK ? add_share(m, leaf, &share) : rc;
        }
    }
    int dim = -1;
    rc = m->tp_plan ? find_cut(m, leaf, &dim) : FC_OK;
    return rc != FC_OK ? rc : dim >= 0 ? add_part(m, leaf, dim) : add_plain(m, leaf);
}
