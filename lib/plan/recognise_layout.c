/*
 * Infers the layout of a stored checkpoint: one mesh, and placements on it, from the chunks of all tensors and the
 * ranks that wrote them. `convert` uses it to keep a layout, even if the source's format (DCP) records only boxes.
 *
 * Meshes are tried in order of size, starting with the number of ranks that wrote something. A wrong mesh fails at one
 * of its first tensors.
 */
#include "fsdpckpt/sharding.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_RANKS = 1 << 20,
    MORE_RANKS =
        64 /* tried beyond the ranks that wrote something, as a group of TP ranks or the last ranks may be empty */
};

/* A tensor that is sharded, and the dimensions along which it is. */
typedef struct sharded_tensor {
    size_t index; /* in `tensors` */
    int nsharded; /* 1 or 2 */
    int dims[2];
} sharded_tensor;

typedef struct search {
    const fc_checkpoint *source;
    const fc_tensor *const *tensors;
    size_t count;
    sharded_tensor *sharded;
    size_t nsharded;
    int64_t ranks;            /* number of ranks that wrote something; 0: unknown */
    int64_t most_chunks;      /* the largest number of distinct chunks of a tensor */
    bool by_rank;             /* each chunk must be the box of the rank that wrote it; otherwise of any rank */
    fc_mesh mesh;             /* the mesh that is being tried */
    int dp, tp;               /* its dimensions, or -1 */
    fc_placement (*found)[3]; /* one entry per sharded tensor */
    size_t farthest;          /* the sharded tensor at which the best mesh failed */
    int64_t *boxes;           /* scratch of `any_rank` */
    size_t boxes_capacity;
} search;

static fc_code refuse_tensor(const search *s, const fc_tensor *t, fc_error *err) {
    fc_code rc = fc_fail(err, FC_EUNSUPPORTED,
                         "%s: tensor '%s': its %zu chunks are not the shards of a mesh (replicate x dp x tp), so the "
                         "layout cannot be kept",
                         s->source->path, t->name, t->nchunks);
    return fc_advise(err, rc, FC_HINT_LAYOUT, NULL);
}

/* ---- one tensor on one mesh ---- */

/* Whether each chunk is the local box of the rank that wrote it. */
static bool own_rank(const search *s, const fc_tensor *t, const fc_placement *placements) {
    int64_t coordinate[FC_MAX_MESH_DIMS], box[2 * FC_MAX_DIMS], ranks = fc_mesh_ranks(&s->mesh);
    fc_error ignored;
    for (size_t i = 0; i < t->nchunks; i++) {
        const fc_chunk *chunk = &t->chunks[i];
        if (chunk->rank >= ranks) {
            return false;
        }
        fc_mesh_coordinate(&s->mesh, chunk->rank, coordinate);
        if (fc_local_box(t->ndim, t->shape, &s->mesh, placements, coordinate, box, box + t->ndim, &ignored) != FC_OK ||
            memcmp(box, chunk->dims, 2 * (size_t)t->ndim * sizeof *box) != 0) {
            return false;
        }
    }
    return true;
}

/* Whether each chunk is the local box of some rank. */
static bool any_rank(search *s, const fc_tensor *t, const fc_placement *placements) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    size_t width = 2 * (size_t)t->ndim, ranks = (size_t)fc_mesh_ranks(&s->mesh), need;
    fc_error ignored;
    if (!fc_mul_size(width, ranks, &need)) {
        return false;
    }
    if (need > s->boxes_capacity) {
        free(s->boxes);
        s->boxes = malloc(need * sizeof *s->boxes);
        s->boxes_capacity = s->boxes ? need : 0;
    }
    if (!s->boxes) {
        return false;
    }
    for (size_t rank = 0; rank < ranks; rank++) {
        int64_t *box = s->boxes + rank * width;
        fc_mesh_coordinate(&s->mesh, (int64_t)rank, coordinate);
        if (fc_local_box(t->ndim, t->shape, &s->mesh, placements, coordinate, box, box + t->ndim, &ignored) != FC_OK) {
            return false;
        }
    }
    fc_sort_items_by(s->boxes, ranks, width * sizeof *s->boxes, fc_order_rows, &width);
    for (size_t i = 0; i < t->nchunks; i++) {
        size_t low = 0;
        FC_BISECT(low, ranks, middle, fc_order_rows(s->boxes + middle * width, t->chunks[i].dims, &width) < 0);
        if (low == ranks || fc_order_rows(s->boxes + low * width, t->chunks[i].dims, &width) != 0) {
            return false;
        }
    }
    return true;
}

static fc_placement shard(int dim) {
    return (fc_placement){FC_SHARD, dim, 0};
}

/* Tries one combination of placements along dp and tp. Fails if the mesh lacks a dimension that it needs. */
static bool try_placements(search *s, const fc_tensor *t, fc_placement dp, fc_placement tp, fc_placement *out) {
    memset(out, 0, 3 * sizeof *out);
    if ((dp.kind != FC_REPLICATE && s->dp < 0) || (tp.kind != FC_REPLICATE && s->tp < 0)) {
        return false;
    }
    if (s->dp >= 0) {
        out[s->dp] = dp;
    }
    if (s->tp >= 0) {
        out[s->tp] = tp;
    }
    return s->by_rank ? own_rank(s, t, out) : any_rank(s, t, out);
}

/* The chunks are known to cover the tensor, so if each chunk is a local box, each local box is a chunk. */
static bool fit_tensor(search *s, const sharded_tensor *c, fc_placement *out) {
    static const fc_placement replicate = {FC_REPLICATE, 0, 0};
    const fc_tensor *t = s->tensors[c->index];
    fc_placement a = shard(c->dims[0]), b = shard(c->dims[1]);
    if (c->nsharded == 2) {
        return try_placements(s, t, a, b, out) || try_placements(s, t, b, a, out);
    }
    fc_placement strided = {FC_STRIDED_SHARD, c->dims[0], s->tp >= 0 ? s->mesh.sizes[s->tp] : 1};
    return try_placements(s, t, a, replicate, out) || try_placements(s, t, replicate, a, out) ||
           try_placements(s, t, strided, a, out) || try_placements(s, t, a, a, out);
}

/* ---- all tensors, all meshes ---- */

static int add_dimension(fc_mesh *mesh, const char *name, int64_t size) {
    if (size == 1) {
        return -1;
    }
    mesh->sizes[mesh->ndim] = size;
    snprintf(mesh->names[mesh->ndim], sizeof mesh->names[0], "%s", name);
    return mesh->ndim++;
}

static bool fit_mesh(search *s, int64_t replicas, int64_t dp, int64_t tp) {
    s->mesh = (fc_mesh){0};
    add_dimension(&s->mesh, "replicate", replicas);
    s->dp = add_dimension(&s->mesh, "dp", dp);
    s->tp = add_dimension(&s->mesh, "tp", tp);
    for (size_t i = 0; i < s->nsharded; i++) {
        if (!fit_tensor(s, &s->sharded[i], s->found[i])) {
            s->farthest = i > s->farthest ? i : s->farthest;
            return false;
        }
    }
    return true;
}

/* Tries meshes with few dimensions first. Replicas explain a checkpoint better than a TP dimension that shards nothing.
 */
static bool fit_ranks(search *s, int64_t ranks) {
    if (fit_mesh(s, 1, ranks, 1)) {
        return true;
    }
    for (int64_t r = 2; r < ranks; r++) {
        if (ranks % r == 0 && fit_mesh(s, r, ranks / r, 1)) {
            return true;
        }
    }
    for (int64_t r = 1; r < ranks; r++) {
        for (int64_t tp = 2; ranks % r == 0 && tp < ranks / r; tp++) {
            if (ranks / r % tp == 0 && fit_mesh(s, r, ranks / r / tp, tp)) {
                return true;
            }
        }
    }
    return false;
}

/* A rank whose boxes are all empty, or stored by another rank, wrote nothing, so there may be more ranks than known. */
static bool fit(search *s) {
    s->by_rank = true;
    for (int64_t ranks = s->ranks; ranks <= s->ranks + MORE_RANKS && ranks <= MAX_RANKS; ranks++) {
        if (fit_ranks(s, ranks)) {
            return true;
        }
    }
    s->by_rank = false;
    return fit_ranks(s, s->ranks) || (s->most_chunks <= MAX_RANKS && fit_ranks(s, s->most_chunks));
}

/* ---- evidence from the chunks ---- */

static void count_ranks(search *s) {
    for (size_t i = 0; i < s->source->ntensors; i++) {
        const fc_tensor *t = &s->source->tensors[i];
        for (size_t c = 0; c < t->nchunks; c++) {
            if (t->chunks[c].rank < MAX_RANKS && t->chunks[c].rank >= s->ranks) {
                s->ranks = (int64_t)t->chunks[c].rank + 1;
            }
        }
    }
}

static fc_code find_sharded(search *s, fc_error *err) {
    fc_sharding_scratch scratch = {0};
    fc_sharding sharding;
    fc_code rc = FC_OK;
    for (size_t i = 0; i < s->count; i++) {
        const fc_tensor *t = s->tensors[i];
        if (t->object || t->nchunks == 0) {
            continue;
        }
        if (!fc_recognise_sharding(t, &scratch, &sharding)) {
            rc = fc_no_memory(err, s->source->path);
            goto out;
        } else if (!sharding.grid || sharding.nsharded > 2) {
            FC_TRY_GOTO(refuse_tensor(s, t, err), rc, out);
        } else if (sharding.nsharded > 0) {
            s->sharded[s->nsharded++] = (sharded_tensor){i, sharding.nsharded, {sharding.dims[0], sharding.dims[1]}};
            s->most_chunks = (int64_t)scratch.ncells > s->most_chunks ? (int64_t)scratch.ncells : s->most_chunks;
        }
    }
out:
    fc_sharding_scratch_free(&scratch);
    return rc;
}

/* A single mesh dimension is FSDP's unless some tensor is sharded along another dimension than the first; then it is
 * TP's.
 */
static void name_single(search *s) {
    bool rows = true;
    for (size_t i = 0; i < s->nsharded; i++) {
        rows = rows && s->sharded[i].dims[0] == 0;
    }
    if (s->mesh.ndim == 1 && !rows) {
        snprintf(s->mesh.names[0], sizeof s->mesh.names[0], "tp");
    }
}

/* A whole tensor is replicated. An empty tensor has no boxes to show its layout, so it is sharded as FSDP would. */
static fc_code fill_placements(const search *s, fc_arena *arena, fc_placement **out, fc_error *err) {
    size_t width = (size_t)s->mesh.ndim;
    fc_placement *placements = fc_arena_calloc(arena, s->count * width, sizeof *placements);
    FC_NEED(placements, err, s->source->path);
    for (size_t i = 0; i < s->count; i++) {
        const fc_tensor *t = s->tensors[i];
        if (!t->object && t->nchunks == 0 && t->ndim > 0 && s->dp >= 0) {
            placements[i * width + (size_t)s->dp] = shard(0);
        }
    }
    for (size_t i = 0; i < s->nsharded; i++) {
        memcpy(&placements[s->sharded[i].index * width], s->found[i], width * sizeof *placements);
    }
    *out = placements;
    return FC_OK;
}

/* The layout of one rank. */
static fc_code single(search *s, fc_arena *arena, fc_placement **placements, fc_error *err) {
    s->mesh = (fc_mesh){0};
    s->dp = 0;
    s->mesh.ndim = 1;
    s->mesh.sizes[0] = 1;
    snprintf(s->mesh.names[0], sizeof s->mesh.names[0], "dp");
    s->nsharded = 0;
    FC_TRY(fill_placements(s, arena, placements, err));
    for (size_t i = 0; i < s->count; i++) {
        if (!s->tensors[i]->object && s->tensors[i]->ndim > 0) {
            (*placements)[i] = shard(0);
        }
    }
    return FC_OK;
}

static fc_code infer(search *s, fc_arena *arena, fc_mesh *mesh, fc_placement **placements, fc_error *err) {
    fc_code rc = FC_OK;
    count_ranks(s);
    if (s->ranks == 0) {
        return FC_OK;
    }
    s->sharded = calloc(s->count + 1, sizeof *s->sharded);
    s->found = calloc(s->count + 1, sizeof *s->found);
    FC_TRY_GOTO(s->sharded && s->found ? FC_OK : fc_no_memory(err, s->source->path), rc, out);
    FC_TRY_GOTO(find_sharded(s, err), rc, out);
    if (s->nsharded == 0) {
        goto out;
    }
    if (!fit(s)) {
        rc = refuse_tensor(s, s->tensors[s->sharded[s->farthest].index], err);
        goto out;
    }
    name_single(s);
    *mesh = s->mesh;
    rc = fill_placements(s, arena, placements, err);
out:
    free(s->sharded);
    free(s->found);
    free(s->boxes);
    return rc;
}

static fc_code recorded(const fc_checkpoint *source, size_t count, const fc_tensor *const *tensors, fc_arena *arena,
                        fc_placement **placements, fc_error *err) {
    size_t width = (size_t)source->mesh.ndim;
    *placements = fc_arena_calloc(arena, count * width, sizeof **placements);
    FC_NEED(*placements, err, source->path);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i]->placements) {
            memcpy(*placements + i * width, tensors[i]->placements, width * sizeof **placements);
        }
    }
    return FC_OK;
}

fc_code fc_recognise_layout(const fc_checkpoint *source, size_t count, const fc_tensor *const *tensors, fc_arena *arena,
                            fc_mesh *mesh, fc_placement **placements, fc_error *err) {
    *mesh = source->mesh;
    *placements = NULL;
    if (source->mesh.ndim > 0) {
        return recorded(source, count, tensors, arena, placements, err);
    }
    search s = {.source = source, .tensors = tensors, .count = count};
    return infer(&s, arena, mesh, placements, err);
}

static fc_code fit_exactly(search *s, fc_arena *arena, fc_placement **placements, fc_error *err) {
    FC_TRY(find_sharded(s, err));
    if (s->ranks == 1) {
        return single(s, arena, placements, err);
    }
    if (s->nsharded == 0) {
        fit_mesh(s, s->ranks, 1, 1);
    } else if (!fit_ranks(s, s->ranks)) {
        return refuse_tensor(s, s->tensors[s->sharded[s->farthest].index], err);
    }
    name_single(s);
    return fill_placements(s, arena, placements, err);
}

fc_code fc_recognise_layout_of(const fc_checkpoint *source, int64_t ranks, fc_arena *arena, fc_mesh *mesh,
                               fc_placement **placements, fc_error *err) {
    const fc_tensor **tensors = fc_arena_calloc(arena, source->ntensors + 1, sizeof *tensors);
    search s = {.source = source, .tensors = tensors, .count = source->ntensors, .ranks = ranks, .by_rank = true};
    fc_code rc = FC_OK;
    s.sharded = calloc(s.count + 1, sizeof *s.sharded);
    s.found = calloc(s.count + 1, sizeof *s.found);
    FC_TRY_GOTO(tensors && s.sharded && s.found ? FC_OK : fc_no_memory(err, source->path), rc, out);
    for (size_t i = 0; i < s.count; i++) {
        tensors[i] = &source->tensors[i];
    }
    FC_TRY_GOTO(fit_exactly(&s, arena, placements, err), rc, out);
    *mesh = s.mesh;
out:
    free(s.sharded);
    free(s.found);
    free(s.boxes);
    return rc;
}
