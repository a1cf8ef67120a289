/*
 * DTensor.redistribute: from one set of placements to another, by gathering along mesh dimensions and cutting again.
 * Takes this rank's part and the mesh's communicators, gives the new part. Every step is checked against the boxes of
 * fc_local_box, so what is gathered is proved to fit before it is moved.
 */
#include "fsdpckpt/train/dtensor_data.h"

#include "base/checked.h"
#include "base/try.h"

#include <stdlib.h>
#include <string.h>

/* A DTensor half way: `local` is owned here once it is not the caller's any more. */
typedef struct work {
    const fc_device_mesh *mesh;
    int ndim;
    const int64_t *shape;
    fc_placement placements[FC_MAX_MESH_DIMS];
    fc_array local;
    fc_stream *stream;
} work;

static bool cuts(const fc_placement *p) {
    return p->kind == FC_SHARD || p->kind == FC_STRIDED_SHARD;
}

static bool same(const fc_placement *a, const fc_placement *b) {
    return a->kind == b->kind && (!cuts(a) || a->dim == b->dim) &&
           (a->kind != FC_STRIDED_SHARD || a->split_factor == b->split_factor);
}

/* Whether mesh dimension `m` has to be whole on the way: it changes itself, or what is cut outside of it does. */
static bool must_gather(const fc_placement *from, const fc_placement *to, int m) {
    if (!cuts(&from[m])) {
        return false;
    }
    if (!same(&from[m], &to[m])) {
        return true;
    }
    for (int outer = 0; outer < m; outer++) {
        /* A _StridedShard is cut after what is inside of it: it comes and goes without disturbing that. */
        bool before = from[outer].kind == FC_SHARD && from[outer].dim == from[m].dim;
        bool after = to[outer].kind == FC_SHARD && to[outer].dim == from[m].dim;
        if ((before || after) && !same(&from[outer], &to[outer])) {
            return true;
        }
    }
    return false;
}

static void replace_local(work *w, fc_array *with) {
    fc_array_free(&w->local);
    w->local = *with;
}

/* What one rank of the group holds, as bytes in the gathered buffer and as a box in the new local array. */
typedef struct gather {
    int64_t base[FC_MAX_DIMS], sizes[FC_MAX_DIMS]; /* the new local box */
    int64_t (*offsets)[FC_MAX_DIMS], (*pieces)[FC_MAX_DIMS];
    size_t *counts, *displs;
    size_t total;
} gather;

static void gather_free(gather *g) {
    free(g->offsets);
    free(g->pieces);
    free(g->counts);
    free(g->displs);
}

static fc_code measure_piece(const work *w, int m, int64_t place, gather *g, fc_error *err) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    memcpy(coordinate, w->mesh->coordinate, sizeof coordinate);
    coordinate[m] = place;
    FC_TRY(fc_local_box(w->ndim, w->shape, &w->mesh->mesh, w->placements, coordinate, g->offsets[place],
                        g->pieces[place], err));
    int64_t elements;
    bool fits = fc_numel(w->ndim, g->pieces[place], &elements);
    g->counts[place] = fits ? (size_t)elements * fc_dtype_size(w->local.dtype) : 0;
    g->displs[place] = g->total;
    if (!fits || !fc_add_size(g->total, g->counts[place], &g->total)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the pieces of a DTensor do not fit 64 bits");
    }
    for (int d = 0; d < w->ndim; d++) {
        g->offsets[place][d] -= g->base[d];
    }
    return FC_OK;
}

/* The pieces must tile the new box, else a mesh dimension was gathered that another one still cuts. */
static fc_code measure(const work *w, int m, gather *g, fc_error *err) {
    fc_placement whole[FC_MAX_MESH_DIMS];
    int64_t places = w->mesh->mesh.sizes[m], elements;
    memcpy(whole, w->placements, sizeof whole);
    whole[m] = (fc_placement){FC_REPLICATE, 0, 0};
    g->offsets = calloc((size_t)places, sizeof *g->offsets);
    g->pieces = calloc((size_t)places, sizeof *g->pieces);
    g->counts = calloc((size_t)places, sizeof *g->counts);
    g->displs = calloc((size_t)places, sizeof *g->displs);
    if (!g->offsets || !g->pieces || !g->counts || !g->displs) {
        return fc_fail(err, FC_ENOMEM, "out of memory to gather a DTensor over %lld ranks", (long long)places);
    }
    fc_code rc = fc_local_box(w->ndim, w->shape, &w->mesh->mesh, whole, w->mesh->coordinate, g->base, g->sizes, err);
    for (int64_t place = 0; rc == FC_OK && place < places; place++) {
        rc = measure_piece(w, m, place, g, err);
    }
    for (int64_t place = 0; rc == FC_OK && place < places; place++) {
        fc_box box = {w->ndim, g->offsets[place], g->pieces[place]};
        if (g->counts[place] > 0 && !fc_box_within(&box, g->sizes)) {
            rc = fc_fail(err, FC_EUNSUPPORTED, "mesh dimension %d cannot be gathered before those inside of it", m);
        }
    }
    if (rc == FC_OK &&
        (!fc_numel(w->ndim, g->sizes, &elements) || g->total != (size_t)elements * fc_dtype_size(w->local.dtype))) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "the parts of mesh dimension %d do not make up a box", m);
    }
    return rc;
}

static fc_code unpack(const work *w, int64_t places, const gather *g, void *packed, const fc_array *to, fc_error *err) {
    for (int64_t place = 0; place < places; place++) {
        fc_array piece, view = *to;
        if (g->counts[place] == 0) {
            continue;
        }
        fc_code rc = fc_array_over(to->device, to->dtype, w->ndim, g->pieces[place], (char *)packed + g->displs[place],
                                   &piece, err);
        for (int d = 0; rc == FC_OK && d < w->ndim; d++) {
            rc = fc_array_narrow(&view, d, g->offsets[place][d], g->pieces[place][d], &view, err);
        }
        if (rc == FC_OK) {
            rc = fc_array_copy(&view, &piece, w->stream, err);
        }
        if (rc != FC_OK) {
            return rc;
        }
    }
    return FC_OK;
}

/* Sharded(m) -> Replicate(m): an uneven all-gather along mesh dimension m. */
static fc_code gather_dim(work *w, int m, fc_error *err) {
    gather g = {0};
    fc_array send = {0}, packed = {0}, whole = {0};
    fc_comm *group = w->mesh->groups[m];
    fc_device *device = w->local.device;
    fc_code rc = measure(w, m, &g, err);
    if (rc == FC_OK && !fc_array_is_contiguous(&w->local)) {
        rc = fc_array_clone(&w->local, w->stream, &send, err);
    } else if (rc == FC_OK) {
        send = w->local;
        send.memory = NULL;
    }
    if (rc == FC_OK) {
        rc = fc_array_new(device, FC_U8, 1, (int64_t[]){(int64_t)g.total}, &packed, err);
    }
    if (rc == FC_OK) {
        rc = fc_array_new(device, w->local.dtype, w->ndim, g.sizes, &whole, err);
    }
    if (rc == FC_OK) {
        rc = group->all_gather_v(group, send.data, packed.data, g.counts, g.displs, w->stream, err);
    }
    if (rc == FC_OK) {
        rc = unpack(w, w->mesh->mesh.sizes[m], &g, packed.data, &whole, err);
    }
    if (rc == FC_OK) {
        rc = device->synchronize(device, w->stream, err); /* what was sent and received is freed below */
    }
    if (rc == FC_OK) {
        w->placements[m] = (fc_placement){FC_REPLICATE, 0, 0};
        replace_local(w, &whole);
    } else {
        fc_array_free(&whole);
    }
    fc_array_free(&send);
    fc_array_free(&packed);
    gather_free(&g);
    return rc;
}

/* Replicate(m) -> Shard(m): a view, which the end copies. */
static fc_code cut_dim(work *w, int m, const fc_placement *to, fc_error *err) {
    int64_t before[FC_MAX_DIMS], had[FC_MAX_DIMS], after[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    fc_code rc = fc_local_box(w->ndim, w->shape, &w->mesh->mesh, w->placements, w->mesh->coordinate, before, had, err);
    w->placements[m] = *to;
    if (rc == FC_OK) {
        rc = fc_local_box(w->ndim, w->shape, &w->mesh->mesh, w->placements, w->mesh->coordinate, after, sizes, err);
    }
    fc_array view = w->local;
    for (int d = 0; rc == FC_OK && d < w->ndim; d++) {
        int64_t start = sizes[d] > 0 ? after[d] - before[d] : 0;
        if (start < 0 || start + sizes[d] > had[d]) { /* where torch puts uneven parts of a _StridedShard */
            return fc_fail(err, FC_EUNSUPPORTED, "a _StridedShard of %lld rows, which are not cut evenly",
                           (long long)w->shape[d]);
        }
        rc = fc_array_narrow(&view, d, start, sizes[d], &view, err);
    }
    if (rc == FC_OK) {
        view.memory = w->local.memory;
        w->local = view;
    }
    return rc;
}

/* The ranks of a mesh dimension must mean the same tensor, or the gather would wait for bytes that nobody sends. */
static fc_code agree_on_shape(const work *w, int m, fc_error *err) {
    fc_comm *group = w->mesh->groups[m];
    size_t bytes = (size_t)w->ndim * sizeof(int64_t), all_bytes;
    fc_array mine = {0}, all = {0};
    int64_t *host = NULL;
    if (!fc_mul_size(bytes, (size_t)group->size, &all_bytes)) {
        return fc_fail(err, FC_EUNSUPPORTED, "a mesh dimension of %d ranks", group->size);
    }
    if (w->ndim == 0) {
        return FC_OK;
    }
    fc_device *device = w->local.device;
    fc_code rc = fc_array_new(device, FC_I64, 1, (int64_t[]){w->ndim}, &mine, err);
    if (rc == FC_OK) {
        rc = fc_array_new(device, FC_I64, 1, (int64_t[]){(int64_t)w->ndim * group->size}, &all, err);
    }
    host = malloc(all_bytes);
    if (rc == FC_OK && !host) {
        rc = fc_fail(err, FC_ENOMEM, "out of memory to compare a shape over %d ranks", group->size);
    }
    if (rc == FC_OK) {
        rc = device->copy(device, mine.data, w->shape, bytes, w->stream, err);
    }
    if (rc == FC_OK) {
        rc = group->all_gather(group, mine.data, all.data, bytes, w->stream, err);
    }
    if (rc == FC_OK) {
        rc = device->copy(device, host, all.data, all_bytes, w->stream, err);
    }
    if (rc == FC_OK) {
        rc = device->synchronize(device, w->stream, err);
    }
    for (int r = 0; rc == FC_OK && r < group->size; r++) {
        if (memcmp(host + (size_t)r * (size_t)w->ndim, host, bytes) != 0) {
            rc = fc_fail(err, FC_ECORRUPT,
                         "the DTensor is not cut evenly: ranks 0 and %d of mesh dimension %d infer different shapes", r,
                         m);
        }
    }
    free(host);
    fc_array_free(&mine);
    fc_array_free(&all);
    return rc;
}

static fc_code check(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_error *err) {
    if (!tensor->is_dtensor) {
        return fc_fail(err, FC_EUSAGE, "a plain tensor has no placements to change");
    }
    for (int m = 0; m < tensor->mesh->mesh.ndim; m++) {
        if (tensor->spec.placements[m].kind == FC_PARTIAL || placements[m].kind == FC_PARTIAL) {
            return fc_fail(err, FC_EUNSUPPORTED, "mesh dimension %d is Partial: it needs a reduction first", m);
        }
    }
    return FC_OK;
}

/* A _StridedShard is cut last and gathered first: what it is over must be there. */
static fc_code gather_all(work *w, const fc_placement *from, const fc_placement *to, fc_placement_kind kind,
                          fc_error *err) {
    fc_code rc = FC_OK;
    for (int m = w->mesh->mesh.ndim; rc == FC_OK && m-- > 0;) {
        if (from[m].kind == kind && must_gather(from, to, m)) {
            rc = agree_on_shape(w, m, err);
            rc = rc == FC_OK ? gather_dim(w, m, err) : rc;
        }
    }
    return rc;
}

static fc_code cut_all(work *w, const fc_placement *to, fc_placement_kind kind, fc_error *err) {
    fc_code rc = FC_OK;
    for (int m = 0; rc == FC_OK && m < w->mesh->mesh.ndim; m++) {
        if (to[m].kind == kind && !cuts(&w->placements[m])) {
            rc = cut_dim(w, m, &to[m], err);
        }
    }
    return rc;
}

fc_code fc_redistribute(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_stream *stream,
                        fc_fsdp_tensor *out, fc_error *err) {
    FC_TRY(check(tensor, placements, err));
    const fc_placement *from = tensor->spec.placements;
    work w = {tensor->mesh, tensor->spec.ndim, tensor->spec.shape, {{0}}, tensor->local, stream};
    fc_array copy = {0};
    memcpy(w.placements, from, sizeof w.placements);
    w.local.memory = NULL;
    fc_code rc = gather_all(&w, from, placements, FC_STRIDED_SHARD, err);
    rc = rc == FC_OK ? gather_all(&w, from, placements, FC_SHARD, err) : rc;
    rc = rc == FC_OK ? cut_all(&w, placements, FC_SHARD, err) : rc;
    rc = rc == FC_OK ? cut_all(&w, placements, FC_STRIDED_SHARD, err) : rc;
    /* A view of what was gathered would keep all of it alive, a view of the argument would not be new. */
    if (rc == FC_OK) {
        rc = fc_array_clone(&w.local, stream, &copy, err);
    }
    if (rc == FC_OK && w.local.memory) {
        rc = w.local.device->synchronize(w.local.device, stream, err);
    }
    fc_array_free(&w.local);
    if (rc == FC_OK) {
        rc = fc_dtensor_from_local(&copy, tensor->mesh, placements, w.ndim, w.shape, out, err);
    }
    if (rc != FC_OK) {
        fc_array_free(&copy);
        return rc;
    }
    out->local = copy;
    return FC_OK;
}
