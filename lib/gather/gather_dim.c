/*
 * Gathers DTensors along one mesh dimension: the ranks' boxes into one buffer, and from there to their places. Often
 * the buffer is the result: shards along dimension 0 follow one another. Other buffers are the mesh's. The ranks
 * allocate, agree that they could and that the shapes are equal, and only then communicate.
 */
#include "gather/gather_dim.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "gather/pool.h"

#include <stdlib.h>
#include <string.h>

/* The gather of one tensor. Boxes are relative to the new local box; arrays have one entry per rank. */
typedef struct gather {
    fc_tensor_state *tensor;
    int64_t whole_offsets[FC_MAX_DIMS], whole_sizes[FC_MAX_DIMS]; /* the new local box in the tensor */
    int64_t (*box_offsets)[FC_MAX_DIMS], (*box_sizes)[FC_MAX_DIMS];
    size_t *counts, *displs; /* bytes of each box, and their offset in the buffer */
    size_t total;            /* bytes of all boxes */
    size_t slot;             /* bytes per rank in the buffer if they are equal, with padding; else 0 */
    bool is_direct;          /* whether the buffer begins with the result */
    fc_block *block;         /* the memory of a buffer that is not the result */
    fc_array buffer, whole;
} gather;

static void gather_free(gather *g) {
    fc_pool_give(g->tensor->mesh->pool, &g->block, g->tensor->stream, NULL); /* after an error */
    fc_array_free(&g->buffer);
    fc_array_free(&g->whole);
    free(g->box_offsets);
    free(g->box_sizes);
    free(g->counts);
    free(g->displs);
}

static fc_code measure_box(const fc_tensor_state *w, int m, int64_t r, gather *g, fc_error *err) {
    int64_t coordinate[FC_MAX_MESH_DIMS];
    memcpy(coordinate, w->mesh->coordinate, sizeof coordinate);
    coordinate[m] = r;
    FC_TRY(fc_local_box(w->ndim, w->shape, &w->mesh->mesh, w->placements, coordinate, g->box_offsets[r],
                        g->box_sizes[r], err));
    int64_t elements;
    bool fits = fc_numel(w->ndim, g->box_sizes[r], &elements);
    g->counts[r] = fits ? (size_t)elements * fc_dtype_size(w->local.dtype) : 0;
    if (!fits || !fc_add_size(g->total, g->counts[r], &g->total)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the local tensors of a DTensor do not fit in 64 bits");
    }
    for (int d = 0; d < w->ndim; d++) {
        g->box_offsets[r][d] -= g->whole_offsets[d];
    }
    return FC_OK;
}

/* Computes the boxes of all ranks. They must tile the new box: if not, an inner mesh dimension still cuts it. */
static fc_code measure(const fc_tensor_state *w, int m, gather *g, fc_error *err) {
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

/* Lays out the buffer. A collective of equal sizes is faster than one of unequal ones, so it pays to pad a little. */
static fc_code lay_out(gather *g, size_t ranks, size_t *bytes, fc_error *err) {
    size_t largest = 0, padded, at = 0;
    for (size_t r = 0; r < ranks; r++) {
        largest = g->counts[r] > largest ? g->counts[r] : largest;
    }
    if (!fc_mul_size(largest, ranks, &padded)) {
        return fc_fail(err, FC_EUNSUPPORTED, "the local tensors of a DTensor do not fit in 64 bits");
    }
    g->slot = padded - g->total <= g->total / 4 ? largest : 0;
    for (size_t r = 0; r < ranks; r++) {
        g->displs[r] = g->slot ? r * g->slot : at;
        at += g->counts[r];
    }
    *bytes = g->slot ? padded : g->total;
    return FC_OK;
}

/* Returns whether the boxes are whole rows that lie in the buffer where they are in the result. */
static bool are_rows(const gather *g, int64_t ranks) {
    const fc_tensor_state *w = g->tensor;
    size_t row = fc_dtype_size(w->local.dtype);
    for (int d = 1; d < w->ndim; d++) {
        row *= (size_t)g->whole_sizes[d];
    }
    for (int64_t r = 0; r < ranks; r++) {
        if (g->counts[r] == 0) {
            continue;
        }
        for (int d = 1; d < w->ndim; d++) {
            if (g->box_sizes[r][d] != g->whole_sizes[d]) {
                return false;
            }
        }
        if ((size_t)g->box_offsets[r][0] * row != g->displs[r]) {
            return false;
        }
    }
    return w->ndim > 0;
}

static fc_code prepare_gather(gather *g, int m, fc_error *err) {
    const fc_tensor_state *w = g->tensor;
    int64_t ranks = w->mesh->mesh.sizes[m];
    size_t bytes = 0;
    FC_TRY(measure(w, m, g, err));
    FC_TRY(lay_out(g, (size_t)ranks, &bytes, err));
    const int64_t sizes[] = {(int64_t)bytes};
    g->is_direct = are_rows(g, ranks);
    if (g->is_direct) {
        return fc_array_new(w->local.device, FC_U8, 1, sizes, &g->buffer, err);
    }
    FC_TRY(fc_pool_take(w->mesh->pool, bytes, w->stream, &g->block, err));
    FC_TRY(fc_array_over(w->local.device, FC_U8, 1, sizes, g->block->memory, &g->buffer, err));
    return fc_array_new(w->local.device, w->local.dtype, w->ndim, g->whole_sizes, &g->whole, err);
}

static char *slot_of(const gather *g, int64_t rank) {
    return (char *)g->buffer.data + g->displs[rank];
}

/* Copies the local tensor to its place in the buffer. */
static fc_code pack(gather *g, int m, fc_error *err) {
    fc_tensor_state *w = g->tensor;
    int64_t rank = w->mesh->coordinate[m];
    fc_array to;
    if (g->counts[rank] == 0) {
        return FC_OK;
    }
    FC_TRY(fc_array_over(w->local.device, w->local.dtype, w->ndim, w->local.sizes, slot_of(g, rank), &to, err));
    return fc_array_copy(&to, &w->local, w->stream, err);
}

static fc_code communicate(gather *g, int m, fc_error *err) {
    fc_comm *group = g->tensor->mesh->groups[m];
    fc_stream *stream = g->tensor->stream;
    const void *own = slot_of(g, g->tensor->mesh->coordinate[m]);
    return g->slot ? fc_all_gather(group, own, g->buffer.data, g->slot, stream, err)
                   : fc_all_gather_v(group, own, g->buffer.data, g->counts, g->displs, stream, err);
}

static fc_code unpack(gather *g, int64_t ranks, fc_error *err) {
    const fc_tensor_state *w = g->tensor;
    for (int64_t r = 0; r < ranks; r++) {
        fc_array from, view = g->whole;
        if (g->counts[r] == 0) {
            continue;
        }
        FC_TRY(fc_array_over(view.device, view.dtype, w->ndim, g->box_sizes[r], slot_of(g, r), &from, err));
        for (int d = 0; d < w->ndim; d++) {
            FC_TRY(fc_array_narrow(&view, d, g->box_offsets[r][d], g->box_sizes[r][d], &view, err));
        }
        FC_TRY(fc_array_copy(&view, &from, w->stream, err));
    }
    return FC_OK;
}

/* The buffer becomes the result; padding stays after its end. */
static fc_code take_buffer(gather *g, fc_error *err) {
    const fc_tensor_state *w = g->tensor;
    FC_TRY(fc_array_over(w->local.device, w->local.dtype, w->ndim, g->whole_sizes, g->buffer.data, &g->whole, err));
    g->whole.memory = g->buffer.memory;
    g->buffer = (fc_array){0};
    return FC_OK;
}

static fc_code communicate_all(gather *list, size_t count, int m, fc_error *err) {
    fc_comm *group = list[0].tensor->mesh->groups[m];
    fc_code rc = FC_OK;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(pack(&list[i], m, err));
    }
    FC_TRY(fc_comm_group(group, true, err));
    for (size_t i = 0; i < count && rc == FC_OK; i++) {
        rc = communicate(&list[i], m, err);
    }
    fc_code end = fc_comm_group(group, false, rc == FC_OK ? err : NULL);
    FC_TRY(rc == FC_OK ? end : rc);
    for (size_t i = 0; i < count; i++) {
        FC_TRY(list[i].is_direct ? take_buffer(&list[i], err) : unpack(&list[i], group->size, err));
        FC_TRY(fc_pool_give(list[i].tensor->mesh->pool, &list[i].block, list[i].tensor->stream, err));
    }
    return fc_comm_wait(group, list[0].tensor->stream, err); /* the buffers are freed */
}

/* What the ranks compare before they communicate. */
typedef struct statement {
    uint64_t shapes; /* a hash */
    uint64_t failed;
} statement;

/* FNV-1a: equal shapes have equal hashes, and two others collide with a probability of 1 in 2^64. */
static uint64_t hash_shapes(const gather *list, size_t count) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count; i++) {
        const fc_tensor_state *w = list[i].tensor;
        for (int d = -1; d < w->ndim; d++) {
            uint64_t number = d < 0 ? (uint64_t)w->ndim * FC_DTYPE_COUNT + w->local.dtype : (uint64_t)w->shape[d];
            for (int byte = 0; byte < 8; byte++) {
                hash = (hash ^ (number >> (8 * byte) & 0xff)) * 1099511628211u;
            }
        }
    }
    return hash;
}

static fc_code compare_statements(const statement *all, int ranks, int m, fc_code mine, fc_error *err) {
    for (int r = 0; r < ranks && mine == FC_OK; r++) {
        if (all[r].failed) {
            return fc_fail(err, FC_EIO, "rank %d of mesh dimension %d cannot gather a DTensor", r, m);
        }
        if (all[r].shapes != all[0].shapes) {
            return fc_fail(err, FC_ECORRUPT,
                           "the DTensor is not cut evenly: ranks 0 and %d of mesh dimension %d infer different shapes",
                           r, m);
        }
    }
    return mine;
}

/* Agrees on `mine` and on the shapes: if they differed, a gather would wait for bytes that no rank sends. */
static fc_code agree(const gather *list, size_t count, int m, fc_code mine, fc_error *err) {
    fc_comm *group = list[0].tensor->mesh->groups[m];
    fc_stream *stream = list[0].tensor->stream;
    fc_device *device = group->device;
    statement own = {hash_shapes(list, count), mine != FC_OK}, *host = calloc((size_t)group->size, sizeof *host);
    fc_pool *pool = list[0].tensor->mesh->pool;
    fc_block *block = NULL;
    const size_t bytes = sizeof own * (size_t)group->size;
    fc_error other = {0};
    fc_error *told = mine == FC_OK ? err : &other; /* this rank's own failure is the message */
    fc_code rc;
    char *place;
    FC_TRY_GOTO(host ? FC_OK : fc_no_memory(told, "comparing shapes"), rc, out);
    FC_TRY_GOTO(fc_pool_take(pool, bytes, stream, &block, told), rc, out);
    place = (char *)block->memory + sizeof own * (size_t)group->rank;
    FC_TRY_GOTO(device->copy(device, place, &own, sizeof own, stream, told), rc, out);
    FC_TRY_GOTO(fc_all_gather(group, place, block->memory, sizeof own, stream, told), rc, out);
    FC_TRY_GOTO(fc_comm_wait(group, stream, told), rc, out);
    FC_TRY_GOTO(device->copy(device, host, block->memory, bytes, stream, told), rc, out);
    FC_TRY_GOTO(fc_comm_wait(group, stream, told), rc, out);
    FC_TRY_GOTO(fc_pool_give(pool, &block, stream, told), rc, out);
    rc = compare_statements(host, group->size, m, mine, told);
out:
    fc_pool_give(pool, &block, stream, NULL); /* after an error */
    free(host);
    return mine == FC_OK ? rc : mine;
}

fc_code fc_gather_dim(fc_tensor_state *const *tensors, size_t count, int m, fc_error *err) {
    gather *list = calloc(count, sizeof *list);
    fc_code rc = FC_OK;
    FC_NEED(list, err, "gathering DTensors");
    for (size_t i = 0; i < count; i++) {
        list[i].tensor = tensors[i];
        rc = rc == FC_OK ? prepare_gather(&list[i], m, err) : rc;
    }
    FC_TRY_GOTO(agree(list, count, m, rc, err), rc, out);
    FC_TRY_GOTO(communicate_all(list, count, m, err), rc, out);
    for (size_t i = 0; i < count; i++) {
        fc_array_free(&tensors[i]->local);
        tensors[i]->local = list[i].whole;
        tensors[i]->placements[m] = (fc_placement){FC_REPLICATE, 0, 0};
        list[i].whole = (fc_array){0};
    }
out:
    for (size_t i = 0; i < count; i++) {
        gather_free(&list[i]);
    }
    free(list);
    return rc;
}
