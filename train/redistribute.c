/*
 * DTensor.redistribute: changes the placements of a DTensor by gathering along mesh dimensions and cutting again. Every
 * step is checked against the boxes of fc_local_box before data moves.
 */
#include "fsdpckpt/train/dtensor_data.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* A DTensor between two steps. `local` is the caller's tensor at first; after a gather, its memory is owned. */
typedef struct tensor_state {
    const fc_device_mesh *mesh;
    int ndim;
    const int64_t *shape;
    fc_placement placements[FC_MAX_MESH_DIMS];
    fc_array local;
    fc_stream *stream;
} tensor_state;

static bool is_sharded(const fc_placement *p) {
    return p->kind == FC_SHARD || p->kind == FC_STRIDED_SHARD;
}

static bool are_equal(const fc_placement *a, const fc_placement *b) {
    return a->kind == b->kind && (!is_sharded(a) || a->dim == b->dim) &&
           (a->kind != FC_STRIDED_SHARD || a->split_factor == b->split_factor);
}

/* Returns whether mesh dimension `m` must be gathered: its placement changes, or that of an outer one it depends on. */
static bool must_gather(const fc_placement *from, const fc_placement *to, int m) {
    if (!is_sharded(&from[m])) {
        return false;
    }
    if (!are_equal(&from[m], &to[m])) {
        return true;
    }
    for (int outer = 0; outer < m; outer++) {
        /* A _StridedShard is cut after the dimensions inside of it, so it does not affect them. */
        bool before = from[outer].kind == FC_SHARD && from[outer].dim == from[m].dim;
        bool after = to[outer].kind == FC_SHARD && to[outer].dim == from[m].dim;
        if ((before || after) && !are_equal(&from[outer], &to[outer])) {
            return true;
        }
    }
    return false;
}

static void replace_local(tensor_state *w, fc_array *with) {
    fc_array_free(&w->local);
    w->local = *with;
}

/* The gather along one mesh dimension. Boxes are relative to the new local box; arrays have one entry per rank. */
typedef struct gather {
    int64_t whole_offsets[FC_MAX_DIMS], whole_sizes[FC_MAX_DIMS]; /* the new local box in the tensor */
    int64_t (*box_offsets)[FC_MAX_DIMS], (*box_sizes)[FC_MAX_DIMS];
    size_t *counts, *displs; /* bytes of each box, and their offset in the gathered buffer */
    size_t total;            /* bytes of all boxes */
} gather;

static void gather_free(gather *g) {
    free(g->box_offsets);
    free(g->box_sizes);
    free(g->counts);
    free(g->displs);
}

static fc_code measure_box(const tensor_state *w, int m, int64_t r, gather *g, fc_error *err) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    memcpy(coordinate, w->mesh->coordinate, sizeof coordinate);
    coordinate[m] = r;
    FC_TRY(fc_local_box(w->ndim, w->shape, &w->mesh->mesh, w->placements, coordinate, g->box_offsets[r],
                        g->box_sizes[r], err));
    int64_t elements;
    bool fits = fc_numel(w->ndim, g->box_sizes[r], &elements);
    g->counts[r] = fits ? (size_t)elements * fc_dtype_size(w->local.dtype) : 0;
    g->displs[r] = g->total;
    if (!fits || !fc_add_size(g->total, g->counts[r], &g->total)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the local tensors of a DTensor do not fit in 64 bits");
    }
    for (int d = 0; d < w->ndim; d++) {
        g->box_offsets[r][d] -= g->whole_offsets[d];
    }
    return FC_OK;
}

/* Computes the boxes of all ranks. They must tile the new box: if not, an inner mesh dimension still cuts it. */
static fc_code measure(const tensor_state *w, int m, gather *g, fc_error *err) {
    fc_placement whole[FC_MAX_MESH_DIMS];
    int64_t ranks = w->mesh->mesh.sizes[m], elements;
    memcpy(whole, w->placements, sizeof whole);
    whole[m] = (fc_placement){FC_REPLICATE, 0, 0};
    g->box_offsets = calloc((size_t)ranks, sizeof *g->box_offsets);
    g->box_sizes = calloc((size_t)ranks, sizeof *g->box_sizes);
    g->counts = calloc((size_t)ranks, sizeof *g->counts);
    g->displs = calloc((size_t)ranks, sizeof *g->displs);
    if (!g->box_offsets || !g->box_sizes || !g->counts || !g->displs) {
        return fc_fail(err, FC_ENOMEM, "gathering a DTensor over %lld ranks: out of memory", (long long)ranks);
    }
    FC_TRY(fc_local_box(w->ndim, w->shape, &w->mesh->mesh, whole, w->mesh->coordinate, g->whole_offsets, g->whole_sizes,
                        err));
    for (int64_t r = 0; r < ranks; r++) {
        FC_TRY(measure_box(w, m, r, g, err));
    }
    for (int64_t r = 0; r < ranks; r++) {
        fc_box box = {w->ndim, g->box_offsets[r], g->box_sizes[r]};
        if (g->counts[r] > 0 && !fc_box_within(&box, g->whole_sizes)) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "mesh dimension %d cannot be gathered before the dimensions inside of it", m);
        }
    }
    if (!fc_numel(w->ndim, g->whole_sizes, &elements) || g->total != (size_t)elements * fc_dtype_size(w->local.dtype)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the local tensors along mesh dimension %d do not tile a box", m);
    }
    return FC_OK;
}

static fc_code unpack(const tensor_state *w, int64_t ranks, const gather *g, void *packed, const fc_array *to,
                      fc_error *err) {
    for (int64_t r = 0; r < ranks; r++) {
        fc_array from, view = *to;
        if (g->counts[r] == 0) {
            continue;
        }
        void *data = (char *)packed + g->displs[r];
        FC_TRY(fc_array_over(to->device, to->dtype, w->ndim, g->box_sizes[r], data, &from, err));
        for (int d = 0; d < w->ndim; d++) {
            FC_TRY(fc_array_narrow(&view, d, g->box_offsets[r][d], g->box_sizes[r][d], &view, err));
        }
        FC_TRY(fc_array_copy(&view, &from, w->stream, err));
    }
    return FC_OK;
}

/* Sharded(m) -> Replicate(m): an uneven all-gather along mesh dimension m. */
static fc_code gather_dim(tensor_state *w, int m, fc_error *err) {
    gather g = {0};
    fc_array send = {0}, packed = {0}, whole = {0};
    fc_comm *group = w->mesh->groups[m];
    fc_device *device = w->local.device;
    fc_code rc;
    FC_TRY_GOTO(measure(w, m, &g, err), rc, out);
    if (fc_array_is_contiguous(&w->local)) {
        send = w->local;
        send.memory = NULL;
    } else {
        FC_TRY_GOTO(fc_array_clone(&w->local, w->stream, &send, err), rc, out);
    }
    FC_TRY_GOTO(fc_array_new(device, FC_U8, 1, (int64_t[]){(int64_t)g.total}, &packed, err), rc, out);
    FC_TRY_GOTO(fc_array_new(device, w->local.dtype, w->ndim, g.whole_sizes, &whole, err), rc, out);
    FC_TRY_GOTO(group->all_gather_v(group, send.data, packed.data, g.counts, g.displs, w->stream, err), rc, out);
    FC_TRY_GOTO(unpack(w, w->mesh->mesh.sizes[m], &g, packed.data, &whole, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(group, w->stream, err), rc, out); /* the buffers are freed below */
    w->placements[m] = (fc_placement){FC_REPLICATE, 0, 0};
    replace_local(w, &whole);
    whole = (fc_array){0};
out:
    fc_array_free(&whole);
    fc_array_free(&send);
    fc_array_free(&packed);
    gather_free(&g);
    return rc;
}

/* Replicate(m) -> Shard(m): makes a view, which fc_redistribute copies in the end. */
static fc_code cut_dim(tensor_state *w, int m, const fc_placement *to, fc_error *err) {
    int64_t before[FC_MAX_DIMS], had[FC_MAX_DIMS], after[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_mesh *mesh = &w->mesh->mesh;
    FC_TRY(fc_local_box(w->ndim, w->shape, mesh, w->placements, w->mesh->coordinate, before, had, err));
    w->placements[m] = *to;
    FC_TRY(fc_local_box(w->ndim, w->shape, mesh, w->placements, w->mesh->coordinate, after, sizes, err));
    fc_array view = w->local;
    for (int d = 0; d < w->ndim; d++) {
        int64_t start = sizes[d] > 0 ? after[d] - before[d] : 0;
        if (start < 0 || start + sizes[d] > had[d]) { /* an uneven _StridedShard, whose rows torch places elsewhere */
            return fc_fail(err, FC_EUNSUPPORTED, "an uneven _StridedShard of %lld rows is not supported",
                           (long long)w->shape[d]);
        }
        FC_TRY(fc_array_narrow(&view, d, start, sizes[d], &view, err));
    }
    view.memory = w->local.memory;
    w->local = view;
    return FC_OK;
}

/* Checks that the ranks of a mesh dimension agree on the shape. If not, a gather would wait for bytes that no rank
 * sends. */
static fc_code agree_on_shape(const tensor_state *w, int m, fc_error *err) {
    fc_comm *group = w->mesh->groups[m];
    size_t bytes = (size_t)w->ndim * sizeof(int64_t), all_bytes;
    fc_array mine = {0}, all = {0};
    int64_t *host = NULL;
    if (!fc_mul_size(bytes, (size_t)group->size, &all_bytes)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the shapes of %d ranks do not fit in memory", group->size);
    }
    if (w->ndim == 0) {
        return FC_OK;
    }
    fc_device *device = w->local.device;
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(device, FC_I64, 1, (int64_t[]){w->ndim}, &mine, err), rc, out);
    FC_TRY_GOTO(fc_array_new(device, FC_I64, 1, (int64_t[]){(int64_t)w->ndim * group->size}, &all, err), rc, out);
    host = malloc(all_bytes);
    FC_TRY_GOTO(host ? FC_OK : fc_no_memory(err, "comparing shapes"), rc, out);
    FC_TRY_GOTO(device->copy(device, mine.data, w->shape, bytes, w->stream, err), rc, out);
    FC_TRY_GOTO(group->all_gather(group, mine.data, all.data, bytes, w->stream, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(group, w->stream, err), rc, out);
    FC_TRY_GOTO(device->copy(device, host, all.data, all_bytes, w->stream, err), rc, out);
    FC_TRY_GOTO(fc_comm_wait(group, w->stream, err), rc, out);
    for (int r = 0; rc == FC_OK && r < group->size; r++) {
        if (memcmp(host + (size_t)r * (size_t)w->ndim, host, bytes) != 0) {
            rc = fc_fail(err, FC_ECORRUPT,
                         "the DTensor is not cut evenly: ranks 0 and %d of mesh dimension %d infer different shapes", r,
                         m);
        }
    }
out:
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
            return fc_fail(err, FC_EUNSUPPORTED,
                           "mesh dimension %d is Partial, which is not supported: reduce it first", m);
        }
    }
    return FC_OK;
}

/* A _StridedShard is cut last and gathered first, while the dimensions inside of it are cut. */
static fc_code gather_all(tensor_state *w, const fc_placement *from, const fc_placement *to, fc_placement_kind kind,
                          fc_error *err) {
    for (int m = w->mesh->mesh.ndim; m-- > 0;) {
        if (from[m].kind == kind && must_gather(from, to, m)) {
            FC_TRY(agree_on_shape(w, m, err));
            FC_TRY(gather_dim(w, m, err));
        }
    }
    return FC_OK;
}

static fc_code cut_all(tensor_state *w, const fc_placement *to, fc_placement_kind kind, fc_error *err) {
    for (int m = 0; m < w->mesh->mesh.ndim; m++) {
        if (to[m].kind == kind && !is_sharded(&w->placements[m])) {
            FC_TRY(cut_dim(w, m, &to[m], err));
        }
    }
    return FC_OK;
}

fc_code fc_redistribute(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_stream *stream,
                        fc_fsdp_tensor *out, fc_error *err) {
    FC_TRY(check(tensor, placements, err));
    const fc_placement *from = tensor->spec.placements;
    tensor_state w = {tensor->mesh, tensor->spec.ndim, tensor->spec.shape, {{0}}, tensor->local, stream};
    fc_array copy = {0};
    memcpy(w.placements, from, sizeof w.placements);
    w.local.memory = NULL;
    fc_code rc;
    FC_TRY_GOTO(gather_all(&w, from, placements, FC_STRIDED_SHARD, err), rc, out);
    FC_TRY_GOTO(gather_all(&w, from, placements, FC_SHARD, err), rc, out);
    FC_TRY_GOTO(cut_all(&w, placements, FC_SHARD, err), rc, out);
    FC_TRY_GOTO(cut_all(&w, placements, FC_STRIDED_SHARD, err), rc, out);
    /* A view would keep the whole gathered array alive, or share the memory of the caller's tensor. */
    FC_TRY_GOTO(fc_array_clone(&w.local, stream, &copy, err), rc, out);
    if (w.local.memory) {
        FC_TRY_GOTO(w.local.device->synchronize(w.local.device, stream, err), rc, out);
    }
    FC_TRY_GOTO(fc_dtensor_from_local(&copy, tensor->mesh, placements, w.ndim, w.shape, out, err), rc, out);
    out->local = copy;
    copy = (fc_array){0};
out:
    fc_array_free(&w.local);
    fc_array_free(&copy);
    return rc;
}
