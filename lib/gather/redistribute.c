/*
 * DTensor.redistribute: changes the placements of a DTensor by gathering along mesh dimensions and cutting again. Every
 * step is checked against the boxes of fc_local_box before data moves.
 */
#include "fsdpckpt/try.h"
#include "gather/gather_dim.h"

#include <stdlib.h>
#include <string.h>

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

/* Replicate(m) -> Shard(m): makes a view, which fc_redistribute copies in the end. */
static fc_code cut_dim(fc_tensor_state *w, int m, const fc_placement *to, fc_error *err) {
    int64_t before[FC_MAX_DIMS], had[FC_MAX_DIMS], after[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    const fc_mesh *mesh = &w->mesh->mesh;
    FC_TRY(fc_local_box(w->ndim, w->shape, mesh, w->placements, w->mesh->coordinate, before, had, err));
    w->placements[m] = *to;
    FC_TRY(fc_local_box(w->ndim, w->shape, mesh, w->placements, w->mesh->coordinate, after, sizes, err));
    fc_array view = w->local;
    for (int d = 0; d < w->ndim; d++) {
        int64_t start = sizes[d] > 0 ? after[d] - before[d] : 0;
        if (start < 0 || start + sizes[d] > had[d]) { /* a _StridedShard that is not FSDP's over TP */
            return fc_fail(err, FC_EUNSUPPORTED,
                           "_StridedShard(%d, %lld) of %lld rows is not FSDP's over TP, and is not supported", d,
                           (long long)to->split_factor, (long long)w->shape[d]);
        }
        FC_TRY(fc_array_narrow(&view, d, start, sizes[d], &view, err));
    }
    view.memory = w->local.memory;
    w->local = view;
    return FC_OK;
}

static fc_code check_placements(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_error *err) {
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

/* A list of tensors of one mesh, on the way to their placements. */
typedef struct journey {
    const fc_fsdp_tensor *tensors;
    const fc_placement (*to)[FC_MAX_MESH_DIMS]; /* one per tensor */
    size_t count;
    fc_tensor_state *states;
    fc_tensor_state **some; /* those of one step */
} journey;

/* A _StridedShard is cut last and gathered first, while the dimensions inside of it are cut. */
static fc_code gather_all(const journey *j, fc_placement_kind kind, fc_error *err) {
    for (int m = j->tensors[0].mesh->mesh.ndim; m-- > 0;) {
        size_t n = 0;
        for (size_t i = 0; i < j->count; i++) {
            const fc_placement *from = j->tensors[i].spec.placements;
            if (from[m].kind == kind && must_gather(from, j->to[i], m)) {
                j->some[n++] = &j->states[i];
            }
        }
        if (n > 0) {
            FC_TRY(fc_gather_dim(j->some, n, m, err));
        }
    }
    return FC_OK;
}

static fc_code cut_all(fc_tensor_state *w, const fc_placement *to, fc_placement_kind kind, fc_error *err) {
    for (int m = 0; m < w->mesh->mesh.ndim; m++) {
        if (to[m].kind == kind && !is_sharded(&w->placements[m])) {
            FC_TRY(cut_dim(w, m, &to[m], err));
        }
    }
    return FC_OK;
}

/* Whether nothing but the array itself keeps its memory, and all of it is used. */
static bool owns_all(const fc_array *local) {
    return local->memory && local->data == local->memory && fc_array_is_contiguous(local);
}

/* A view would keep the whole gathered array alive, or share the memory of the caller's tensor. */
static fc_code finish_tensor(fc_tensor_state *w, const fc_placement *to, bool is_cut, fc_fsdp_tensor *out,
                             fc_error *err) {
    fc_array local = {0};
    if (!is_cut && owns_all(&w->local)) {
        local = w->local;
    } else {
        FC_TRY(fc_array_clone(&w->local, w->stream, &local, err));
        if (w->local.memory) {
            fc_code rc = fc_comm_wait(w->mesh->groups[0], w->stream, err);
            if (rc != FC_OK) {
                fc_array_free(&local);
                return rc;
            }
        }
        fc_array_free(&w->local);
    }
    w->local = (fc_array){0};
    fc_code rc = fc_dtensor_from_local(&local, w->mesh, to, w->ndim, w->shape, out, err);
    if (rc != FC_OK) {
        fc_array_free(&local);
        return rc;
    }
    out->local = local;
    return FC_OK;
}

static fc_code cut_and_finish(const journey *j, size_t i, fc_fsdp_tensor *out, fc_error *err) {
    fc_tensor_state *w = &j->states[i];
    fc_placement before[FC_MAX_MESH_DIMS];
    memcpy(before, w->placements, sizeof before);
    FC_TRY(cut_all(w, j->to[i], FC_SHARD, err));
    FC_TRY(cut_all(w, j->to[i], FC_STRIDED_SHARD, err));
    return finish_tensor(w, j->to[i], memcmp(before, w->placements, sizeof before) != 0, out, err);
}

/* Redistributes all tensors, or none. */
static fc_code travel(journey *j, fc_stream *stream, fc_fsdp_tensor *out, fc_error *err) {
    size_t done = 0;
    fc_code rc;
    for (size_t i = 0; i < j->count; i++) {
        const fc_fsdp_tensor *t = &j->tensors[i];
        j->states[i] = (fc_tensor_state){t->mesh, t->spec.ndim, t->spec.shape, {{0}}, t->local, stream};
        memcpy(j->states[i].placements, t->spec.placements, sizeof j->states[i].placements);
        j->states[i].local.memory = NULL;
    }
    FC_TRY_GOTO(gather_all(j, FC_STRIDED_SHARD, err), rc, out);
    FC_TRY_GOTO(gather_all(j, FC_SHARD, err), rc, out);
    for (; done < j->count; done++) {
        FC_TRY_GOTO(cut_and_finish(j, done, &out[done], err), rc, out);
    }
out:
    for (size_t i = 0; i < j->count; i++) {
        fc_array_free(&j->states[i].local);
    }
    for (size_t i = 0; rc != FC_OK && i < done; i++) {
        fc_array_free(&out[i].local);
    }
    return rc;
}

static fc_code redistribute(const fc_fsdp_tensor *tensors, size_t count, const fc_placement (*to)[FC_MAX_MESH_DIMS],
                            fc_stream *stream, fc_fsdp_tensor *out, fc_error *err) {
    journey j = {tensors, to, count, NULL, NULL};
    if (count == 0) {
        return FC_OK;
    }
    for (size_t i = 0; i < count; i++) {
        FC_TRY(check_placements(&tensors[i], to[i], err));
    }
    fc_code rc;
    j.states = calloc(count, sizeof *j.states);
    j.some = calloc(count, sizeof *j.some);
    FC_TRY_GOTO(j.states && j.some ? FC_OK : fc_no_memory(err, "redistributing DTensors"), rc, out);
    rc = travel(&j, stream, out, err);
out:
    free(j.states);
    free(j.some);
    return rc;
}

fc_code fc_redistribute(const fc_fsdp_tensor *tensor, const fc_placement *placements, fc_stream *stream,
                        fc_fsdp_tensor *out, fc_error *err) {
    fc_placement to[1][FC_MAX_MESH_DIMS] = {{{FC_REPLICATE, 0, 0}}};
    memcpy(to[0], placements, (tensor->is_dtensor ? (size_t)tensor->mesh->mesh.ndim : 0) * sizeof *placements);
    return redistribute(tensor, 1, (const fc_placement(*)[FC_MAX_MESH_DIMS])to, stream, out, err);
}

/* The placements of TP stay. */
static fc_code gathered_placements(const fc_fsdp_tensor *tensor, const fc_device_mesh *parent_mesh, fc_placement *to,
                                   fc_error *err) {
    if (!tensor->is_dtensor || parent_mesh != tensor->mesh) {
        return fc_fail(err, FC_EUSAGE, "the parent mesh is not the mesh of the DTensor");
    }
    memcpy(to, tensor->spec.placements, FC_MAX_MESH_DIMS * sizeof *to);
    for (int m = 0; m < parent_mesh->mesh.ndim - 1; m++) {
        to[m] = (fc_placement){FC_REPLICATE, 0, 0};
    }
    return FC_OK;
}

fc_code fc_all_gather_dtensors(const fc_fsdp_tensor *tensors, size_t count, const fc_device_mesh *parent_mesh,
                               fc_stream *stream, fc_array *out, fc_error *err) {
    fc_placement(*to)[FC_MAX_MESH_DIMS] = calloc(count + 1, sizeof *to);
    fc_fsdp_tensor *gathered = calloc(count + 1, sizeof *gathered);
    fc_code rc;
    FC_TRY_GOTO(to && gathered ? FC_OK : fc_no_memory(err, "gathering DTensors"), rc, out);
    for (size_t i = 0; i < count; i++) {
        FC_TRY_GOTO(gathered_placements(&tensors[i], parent_mesh, to[i], err), rc, out);
    }
    FC_TRY_GOTO(redistribute(tensors, count, (const fc_placement(*)[FC_MAX_MESH_DIMS])to, stream, gathered, err), rc,
                out);
    for (size_t i = 0; i < count; i++) {
        out[i] = gathered[i].local;
    }
out:
    free(to);
    free(gathered);
    return rc;
}

fc_code fc_all_gather_dtensor(const fc_fsdp_tensor *tensor, const fc_device_mesh *parent_mesh, fc_stream *stream,
                              fc_array *out, fc_error *err) {
    return fc_all_gather_dtensors(tensor, 1, parent_mesh, stream, out, err);
}
