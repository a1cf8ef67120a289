/*
 * Loads a state: each rank reads the elements of its shards, array by array, from whatever files contain them.
 */
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "train/state.h"
#include "train/state_list.h"

#include <limits.h>
#include <stdlib.h>

/* A load that runs. */
typedef struct loading {
    const fc_checkpoint *from;
    fc_state_list list;
    const fc_tensor **sources; /* for each tensor of the list, that of the checkpoint */
    fc_box_request *requests;  /* room for all boxes */
    fc_work_options how;
} loading;

/* ---- finding ---- */

/* A flat state of the optimizer has padding at the end, which depends on the number of ranks. */
static bool tensor_fits(const fc_state_tensor *t, const fc_tensor *source) {
    if (source->object) {
        return false;
    }
    if (t->least > 0 && source->ndim == t->ndim) {
        return source->shape[0] == t->shape[0] || (t->shape[0] > t->least && source->shape[0] >= t->least);
    }
    return fc_same_sizes(source->ndim, source->shape, t->ndim, t->shape);
}

static fc_code find_source(loading *l, const fc_tensor *const *sorted, size_t index, fc_error *err) {
    const fc_state_tensor *t = &l->list.tensors[index];
    const fc_tensor *found = fc_find_named(sorted, l->from->ntensors, t->name);
    if (!found) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %s is missing", l->from->path, t->name);
    }
    l->sources[index] = found;
    if (!tensor_fits(t, found)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %s has another shape than in the training step", l->from->path,
                       t->name);
    }
    const bool casts = t->dtype != found->dtype;
    if (casts && (fc_dtype_get(t->dtype)->cls != FC_CLASS_FLOAT || fc_dtype_get(found->dtype)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: tensor %s is %s and cannot be cast to %s", l->from->path, t->name,
                       fc_dtype_get(found->dtype)->torch_name, fc_dtype_get(t->dtype)->torch_name);
    }
    return fc_check_readable(l->from, found, err);
}

static fc_code find_all(loading *l, fc_error *err) {
    const size_t count = l->from->ntensors;
    const fc_tensor **sorted = fc_list_named(l->from->tensors, count, sizeof *l->from->tensors);
    fc_code rc = FC_OK;
    l->sources = calloc(l->list.ntensors + 1, sizeof *l->sources);
    l->requests = calloc(l->list.nboxes + 1, sizeof *l->requests);
    FC_TRY_GOTO(sorted && l->sources && l->requests ? FC_OK : fc_no_memory(err, NULL), rc, out);
    for (size_t i = 0; i < l->list.ntensors; i++) {
        FC_TRY_GOTO(find_source(l, sorted, i, err), rc, out);
    }
out:
    free(sorted);
    return rc;
}

/* ---- reading ---- */

/* Reads a box that is not row-major in the array. */
static fc_code read_strided(const loading *l, const fc_state_box *box, const fc_box *region, void *to, fc_error *err) {
    const fc_state_tensor *t = &l->list.tensors[box->tensor];
    const uint32_t element = fc_dtype_size(t->dtype);
    fc_device *cpu = NULL;
    fc_strided_box dense = {.ndim = t->ndim}, strided = {.ndim = t->ndim};
    void *row_major = malloc((size_t)fc_box_volume(region) * element + 1);
    fc_code rc;
    FC_TRY_GOTO(row_major ? FC_OK : fc_no_memory(err, t->name), rc, out);
    FC_TRY_GOTO(fc_read_box(l->from, l->sources[box->tensor], region, t->dtype, row_major, err), rc, out);
    FC_TRY_GOTO(fc_device_cpu(&cpu, err), rc, out);
    fc_row_major_strides(t->ndim, region->sizes, dense.strides);
    for (int d = 0; d < t->ndim; d++) {
        dense.sizes[d] = strided.sizes[d] = region->sizes[d];
        strided.strides[d] = box->strides[d];
    }
    rc = cpu->copy_box(cpu, to, &strided, row_major, &dense, element, NULL, err);
out:
    if (cpu) {
        cpu->destroy(cpu);
    }
    free(row_major);
    return rc;
}

/* The part of a box that the checkpoint has: a flat state may have less padding. */
static fc_box region_of(const loading *l, const fc_state_box *box, int64_t *sizes) {
    const fc_state_tensor *t = &l->list.tensors[box->tensor];
    for (int d = 0; d < t->ndim; d++) {
        const int64_t left = l->sources[box->tensor]->shape[d] - box->dims[d], size = box->dims[t->ndim + d];
        sizes[d] = left < size ? (left < 0 ? 0 : left) : size;
    }
    return (fc_box){t->ndim, box->dims, sizes};
}

/* Reads the boxes of one array into its copy. Those that need no change are read together. */
static fc_code read_array(const loading *l, size_t array, void *memory, size_t *next, fc_error *err) {
    size_t count = 0;
    for (; *next < l->list.nboxes && l->list.boxes[*next].array == array; ++*next) {
        const fc_state_box *box = &l->list.boxes[*next];
        const fc_state_tensor *t = &l->list.tensors[box->tensor];
        const fc_tensor *source = l->sources[box->tensor];
        int64_t *sizes = fc_arena_calloc(l->list.arena, (size_t)t->ndim + 1, sizeof *sizes);
        FC_NEED(sizes, err, t->name);
        const fc_box region = region_of(l, box, sizes);
        void *to = (char *)memory + (size_t)box->at * fc_dtype_size(t->dtype);
        if (fc_box_volume(&region) == 0) {
            continue;
        }
        if (source->dtype == t->dtype && fc_is_row_major(t->ndim, sizes, box->strides)) {
            l->requests[count++] = (fc_box_request){source, region, to};
        } else {
            FC_TRY(read_strided(l, box, &region, to, err));
        }
    }
    return fc_read_boxes(l->from, NULL, l->requests, count, &l->how, err);
}

/* Copies an array to the host, which keeps its padding, fills it and copies it back. */
static fc_code load_array(const loading *l, const fc_fsdp *fsdp, size_t index, size_t *next, fc_error *err) {
    const fc_array *array = &l->list.arrays[index];
    fc_device *device = array->device;
    const size_t bytes = fc_array_bytes(array);
    fc_stream *stream = device == fsdp->device ? fsdp->streams[FC_STREAM_COMPUTE] : NULL;
    void *memory = NULL;
    fc_code rc;
    FC_TRY_GOTO(device->alloc_staging(device, bytes, &memory, err), rc, out);
    FC_TRY_GOTO(device->copy(device, memory, array->data, bytes, stream, err), rc, out);
    FC_TRY_GOTO(device->synchronize(device, stream, err), rc, out);
    FC_TRY_GOTO(read_array(l, index, memory, next, err), rc, out);
    FC_TRY_GOTO(device->copy(device, array->data, memory, bytes, stream, err), rc, out);
    rc = device->synchronize(device, stream, err);
out:
    if (memory) {
        device->release_staging(device, memory);
    }
    return rc;
}

static fc_code load_arrays(const loading *l, fc_fsdp *fsdp, fc_error *err) {
    size_t next = 0;
    FC_TRY(fc_fsdp_wait_copies(fsdp, err));
    for (size_t i = 0; i < l->list.narrays; i++) {
        FC_TRY(load_array(l, fsdp, i, &next, err));
    }
    for (fc_fsdp_unit *u = fsdp->units; u; u = u->next) {
        for (fc_fsdp_handle *h = u->handles; h; h = h->next) {
            FC_TRY(fc_fsdp_reshard(h, true, err));
        }
    }
    return FC_OK;
}

/* The ranks may all be on this machine and read the same boxes. */
static void choose_how(loading *l, const fc_fsdp *fsdp) {
    const uint64_t replicas = fsdp->replicate ? (uint64_t)fsdp->replicate->size : 1;
    const uint64_t ranks = (uint64_t)fsdp->shard->size * replicas;
    uint64_t bytes = 0;
    for (size_t i = 0; i < l->list.narrays; i++) {
        bytes += fc_array_bytes(&l->list.arrays[i]);
    }
    l->how.processes = ranks > INT_MAX ? INT_MAX : (int)ranks;
    l->how.cached = bytes <= UINT64_MAX / ranks && fc_fits_cache(bytes * ranks);
}

fc_code fc_fsdp_load(const fc_fsdp_state *state, fc_state_dict_type type, const fc_checkpoint *from, fc_error *err) {
    loading l = {.from = from};
    fc_code rc;
    FC_TRY_GOTO(fc_state_list_new(state, type, true, &l.list, err), rc, out);
    FC_TRY_GOTO(find_all(&l, err), rc, out);
    choose_how(&l, state->fsdp);
    rc = load_arrays(&l, state->fsdp, err);
out:
    free(l.sources);
    free(l.requests);
    fc_state_list_free(&l.list);
    return rc;
}
