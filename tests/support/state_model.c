/*
 * A model for tests of state dicts, see state_model.h.
 */
#include "state_model.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

enum { PARAMS = 9, MOST = 128, NEVER = -1 };

/* A parameter. Element i (in memory order of the local tensor) is number × 100 + i / 4 before the first step. */
typedef struct param {
    int handle;
    const char *fqn;
    int ndim;
    int64_t shape[3];
    bool transposed;
    fc_dtype dtype;
    int shared_with; /* index in the handle */
    int tp;          /* the dimension that tensor parallelism shards */
} param;

static const param params[PARAMS] = {
    {0, "embed.weight", 2, {7, 3}, false, FC_F32, -1, NEVER}, {0, "norm.weight", 1, {5}, false, FC_F32, -1, NEVER},
    {1, "layers.0.w", 3, {4, 4, 3}, false, FC_F32, -1, 0},    {1, "layers.0.b", 1, {1}, false, FC_F32, -1, NEVER},
    {2, "layers.1.w", 2, {6, 9}, true, FC_F32, -1, NEVER},    {2, "layers.1.tied", 2, {6, 9}, true, FC_F32, 0, NEVER},
    {2, "layers.1.row", 2, {4, 7}, false, FC_F32, -1, 1},     {3, "head.weight", 2, {11, 2}, false, FC_BF16, -1, NEVER},
    {4, "head.bias", 1, {2}, false, FC_F32, -1, NEVER},
};
static const int unit_of[STATE_HANDLES] = {0, 1, 2, 3, 3};
static const char *const unit_names[STATE_UNITS] = {"root", "layers.0", "layers.1", "head"};

static float number(int tensor, int64_t i) {
    return (float)(tensor % 16) * 100 + (float)i / 4;
}

/* Returns the place, in the whole tensor, of element `i` of the local tensor of a parameter. */
static int64_t place_of(const fc_device_mesh *tp, const param *p, int64_t i) {
    int64_t sizes[3], offsets[3], index[3], place = 0;
    if (!tp || !p || p->tp == NEVER) {
        return i;
    }
    const fc_placement placement = {FC_SHARD, p->tp, 0};
    fc_local_box(p->ndim, p->shape, &tp->mesh, &placement, tp->coordinate, offsets, sizes, NULL);
    for (int d = p->ndim; d-- > 0; i /= sizes[d]) {
        index[d] = offsets[d] + i % sizes[d];
    }
    for (int d = 0; d < p->ndim; d++) {
        place = place * p->shape[d] + index[d];
    }
    return place;
}

static fc_code fill(const fc_array *array, int tensor, const fc_device_mesh *tp, const param *p, fc_error *err) {
    float numbers[MOST];
    unsigned char bytes[MOST * sizeof *numbers];
    const size_t count = (size_t)fc_array_numel(array);
    for (size_t i = 0; i < count; i++) {
        numbers[i] = number(tensor, place_of(tp, p, (int64_t)i));
    }
    fc_cast(FC_F32, numbers, array->dtype, bytes, count);
    FC_TRY(array->device->copy(array->device, array->data, bytes, count * fc_dtype_size(array->dtype), NULL, err));
    return array->device->synchronize(array->device, NULL, err);
}

static fc_code make_tensor(const param *p, int index, const state_model_options *o, fc_device *device,
                           fc_fsdp_tensor *out, fc_error *err) {
    const bool tp = o->tp && p->tp != NEVER;
    const fc_placement placement = {FC_SHARD, p->tp, 0};
    int64_t sizes[3], offsets[3];
    memcpy(sizes, p->shape, sizeof sizes);
    if (tp) {
        FC_TRY(fc_local_box(p->ndim, p->shape, &o->tp->mesh, &placement, o->tp->coordinate, offsets, sizes, err));
    }
    FC_TRY(fc_array_new(device, p->dtype, p->ndim, sizes, &out->local, err));
    if (p->transposed) {
        out->local.strides[0] = 1;
        out->local.strides[1] = sizes[0];
    }
    FC_TRY(fill(&out->local, index, o->tp, p, err));
    if (tp) {
        void *memory = out->local.memory;
        fc_array local = out->local;
        FC_TRY(fc_dtensor_from_local(&local, o->tp, &placement, p->ndim, p->shape, out, err));
        out->local.memory = memory;
    }
    return FC_OK;
}

static fc_code add_handle(state_model *m, int h, const state_model_options *o, fc_error *err) {
    fc_fsdp_tensor tensors[PARAMS];
    fc_fsdp_param_init init[PARAMS];
    size_t count = 0;
    fc_code rc = FC_OK;
    memset(tensors, 0, sizeof tensors);
    for (int i = 0; rc == FC_OK && i < PARAMS; i++) {
        if (params[i].handle != h) {
            continue;
        }
        const int64_t shared = params[i].shared_with;
        rc = shared < 0 ? make_tensor(&params[i], i, o, m->shard->device, &tensors[count], err) : FC_OK;
        init[count] =
            (fc_fsdp_param_init){params[i].fqn, shared < 0 ? &tensors[count] : &tensors[shared], true, shared};
        count++;
    }
    rc = rc == FC_OK ? fc_fsdp_add_handle(m->units[unit_of[h]], init, count, &m->handles[h], err) : rc;
    for (size_t i = 0; i < count; i++) {
        fc_array_free(&tensors[i].local);
    }
    return rc;
}

/* Returns the parameter number `k` of a handle, without additional names of shared ones. */
static int param_of(int handle, size_t k) {
    int i = 0;
    for (;; i++) {
        if (params[i].handle == handle && params[i].shared_with < 0 && k-- == 0) {
            return i;
        }
    }
}

/* Sets the elements of parameters in an array of the layout of a handle. `tensor` is added to their numbers. */
static fc_code fill_state(const state_model *m, int h, int tensor, fc_array *array, fc_error *err) {
    const fc_flat_layout *l = fc_fsdp_layout(m->handles[h]);
    const int64_t rank = l->world_size > 1 ? m->shards[unit_of[h]]->rank : 0;
    float numbers[MOST];
    unsigned char bytes[MOST * sizeof *numbers];
    memset(numbers, 0, sizeof numbers);
    for (size_t p = 0; p < l->nparams; p++) {
        const fc_flat_shard_info info = fc_flat_shard_of(l, p, rank);
        for (int64_t k = 0; k < info.numel_in_shard; k++) {
            numbers[info.offset_in_shard + k] =
                number(tensor + (int)p, place_of(m->tp, &params[param_of(h, p)], info.intra_param_start + k));
        }
    }
    fc_cast(FC_F32, numbers, array->dtype, bytes, (size_t)l->shard_numel);
    FC_TRY(array->device->copy(array->device, array->data, bytes, fc_array_bytes(array), NULL, err));
    return array->device->synchronize(array->device, NULL, err);
}

static fc_code add_states(state_model *m, int h, fc_error *err) {
    static const char *const names[] = {"exp_avg", "exp_avg_sq"};
    for (int k = 0; k < 2; k++) {
        const int i = 2 * h + k;
        const fc_array *shard = fc_fsdp_local_shard(m->handles[h]);
        const int64_t numel = fc_fsdp_layout(m->handles[h])->shard_numel;
        FC_TRY(
            fc_array_new(shard->device->is_host ? m->cpu : shard->device, shard->dtype, 1, &numel, &m->states[i], err));
        FC_TRY(fill_state(m, h, 3 * h + 5 * k + 1, &m->states[i], err));
        m->optim[m->state.noptim++] = (fc_fsdp_optim_state){m->handles[h], names[k], &m->states[i]};
    }
    return FC_OK;
}

static fc_code add_buffer(state_model *m, fc_error *err) {
    static const int64_t size = 3;
    fc_array values = {0};
    fc_code rc = fc_array_new(m->shard->device, FC_F32, 1, &size, &values, err);
    rc = rc == FC_OK ? fill(&values, 11, NULL, NULL, err) : rc;
    rc = rc == FC_OK ? fc_fsdp_add_buffer(m->units[1], "layers.0.freq", &values, &m->buffer, err) : rc;
    fc_array_free(&values);
    return rc;
}

static fc_code add_values(state_model *m, fc_error *err) {
    static const fc_path_element step[] = {{.key = "optim"}, {.key = "state"}, {.key = "norm.weight"}, {.key = "step"}};
    static const fc_path_element running[] = {{.key = "model"}, {.key = "norm.running"}};
    static const fc_path_element empty[] = {{.key = "empty"}};
    static const fc_path paths[STATE_VALUES] = {{step, 4}, {running, 2}, {empty, 1}};
    static const int ndims[STATE_VALUES] = {0, 2, 1};
    static const int64_t sizes[STATE_VALUES][2] = {{0}, {3, 2}, {0}};
    for (int i = 0; i < STATE_VALUES; i++) {
        fc_device *device = m->shard->device;
        FC_TRY(fc_array_new(device, i == 1 ? FC_F16 : FC_F32, ndims[i], sizes[i], &m->values[i], err));
        FC_TRY(fill(&m->values[i], 7 + i, NULL, NULL, err));
        m->named[i] = (fc_fsdp_value){paths[i], &m->values[i]};
    }
    return FC_OK;
}

/* Gives units 1 and 2 communicators of their own. */
static void mix(const state_model_options *o, fc_comm *shard, int u, fc_fsdp_unit_options *unit) {
    if (o->mixed && u == 1) {
        unit->strategy = FC_FULL_SHARD;
        unit->shard = o->all;
    } else if (o->mixed && u == 2) {
        unit->strategy = FC_HYBRID_SHARD;
        unit->shard = o->replicate;
        unit->replicate = shard;
    }
}

fc_code state_model_open(state_model *m, fc_comm *shard, const state_model_options *o, fc_error *err) {
    memset(m, 0, sizeof *m);
    m->shard = shard;
    m->tp = o->tp;
    FC_TRY(fc_device_cpu(&m->cpu, err));
    FC_TRY(fc_fsdp_new(shard, o->replicate, NULL, &o->fsdp, &m->fsdp, err));
    for (int u = 0; u < STATE_UNITS; u++) {
        fc_fsdp_unit_options unit = o->unit;
        unit.is_root = u == 0;
        unit.has_buffer_dtype = true;
        unit.buffer_dtype = FC_F64;
        mix(o, shard, u, &unit);
        m->shards[u] = unit.shard ? unit.shard : shard;
        FC_TRY(fc_fsdp_add_unit(m->fsdp, unit_names[u], &unit, &m->units[u], err));
    }
    for (int h = 0; h < STATE_HANDLES - o->one_handle; h++) {
        FC_TRY(add_handle(m, h, o, err));
        FC_TRY(add_states(m, h, err));
    }
    FC_TRY(add_buffer(m, err));
    m->state.fsdp = m->fsdp;
    m->state.optim = m->optim;
    m->state.values = m->named;
    m->state.nvalues = STATE_VALUES;
    return add_values(m, err);
}

void state_model_close(state_model *m) {
    fc_fsdp_free(m->fsdp);
    for (int i = 0; i < STATE_OPTIM; i++) {
        fc_array_free(&m->states[i]);
    }
    for (int i = 0; i < STATE_VALUES; i++) {
        fc_array_free(&m->values[i]);
    }
    if (m->cpu) {
        m->cpu->destroy(m->cpu);
    }
}

static fc_code forward(state_model *m, fc_error *err) {
    FC_TRY(fc_fsdp_root_pre_forward(m->fsdp, NULL, 0, err));
    FC_TRY(fc_fsdp_pre_forward(m->units[0], true, NULL, 0, err));
    for (int u = 1; u < STATE_UNITS; u++) {
        FC_TRY(fc_fsdp_pre_forward(m->units[u], true, NULL, 0, err));
        FC_TRY(fc_fsdp_post_forward(m->units[u], err));
    }
    return fc_fsdp_post_forward(m->units[0], err);
}

/* Writes 1 to all gradients. */
static fc_code backward(state_model *m, fc_error *err) {
    for (int u = STATE_UNITS; u-- > 0;) {
        FC_TRY(fc_fsdp_pre_backward(m->units[u], err));
        for (int h = 0; h < STATE_HANDLES; h++) {
            const bool mine = m->handles[h] && unit_of[h] == u;
            const size_t count = mine ? fc_fsdp_layout(m->handles[h])->nparams : 0;
            for (size_t p = 0; p < count; p++) {
                float ones[MOST];
                unsigned char bytes[MOST * sizeof *ones];
                fc_array grad;
                FC_TRY(fc_fsdp_grad(m->handles[h], p, &grad, err));
                for (int i = 0; i < MOST; i++) {
                    ones[i] = 1;
                }
                fc_cast(FC_F32, ones, grad.dtype, bytes, MOST);
                FC_TRY(grad.device->copy(grad.device, grad.data, bytes, fc_array_bytes(&grad), NULL, err));
                FC_TRY(fc_comm_wait(m->shard, NULL, err)); /* `bytes` goes out of scope */
            }
            FC_TRY(mine ? fc_fsdp_post_backward(m->handles[h], err) : FC_OK);
        }
    }
    return fc_fsdp_post_backward_final(m->fsdp, err);
}

fc_code state_model_step(state_model *m, fc_error *err) {
    FC_TRY(forward(m, err));
    FC_TRY(backward(m, err));
    for (int h = 0; h < STATE_HANDLES && m->handles[h]; h++) {
        fc_array *shard = fc_fsdp_local_shard(m->handles[h]), *grad = fc_fsdp_sharded_grad(m->handles[h]);
        fc_array *arrays[] = {shard, &m->states[2 * h], &m->states[2 * h + 1]};
        for (size_t k = 0; k < sizeof arrays / sizeof *arrays; k++) {
            FC_TRY(shard->device->add(shard->device, shard->dtype, arrays[k]->data, grad->data, (size_t)shard->sizes[0],
                                      NULL, err));
        }
    }
    m->steps++;
    return fc_fsdp_zero_grad(m->fsdp, err);
}

static fc_code zero(const fc_array *array, fc_error *err) {
    FC_TRY(array->device->zero(array->device, array->data, fc_array_bytes(array), NULL, err));
    return array->device->synchronize(array->device, NULL, err);
}

fc_code state_model_clear(state_model *m, fc_error *err) {
    for (int h = 0; h < STATE_HANDLES && m->handles[h]; h++) {
        FC_TRY(zero(fc_fsdp_local_shard(m->handles[h]), err));
        FC_TRY(zero(&m->states[2 * h], err));
        FC_TRY(zero(&m->states[2 * h + 1], err));
    }
    FC_TRY(zero(&m->buffer->array, err));
    for (int i = 0; i < STATE_VALUES; i++) {
        FC_TRY(zero(&m->values[i], err));
    }
    return FC_OK;
}

/* Compares element by element what parameters have in an array of the layout of a handle. */
static fc_code check_array(const state_model *m, int h, const int *tensors, const fc_array *array, int steps,
                           fc_error *err) {
    const fc_flat_layout *l = fc_fsdp_layout(m->handles[h]);
    const int64_t rank = l->world_size > 1 ? m->shards[unit_of[h]]->rank : 0;
    unsigned char bytes[MOST * sizeof(double)];
    float got[MOST] = {0};
    FC_TRY(array->device->copy(array->device, bytes, array->data, fc_array_bytes(array), NULL, err));
    FC_TRY(fc_comm_wait(m->shard, NULL, err));
    fc_cast(array->dtype, bytes, FC_F32, got, (size_t)l->shard_numel);
    for (size_t p = 0; p < l->nparams; p++) {
        const fc_flat_shard_info info = fc_flat_shard_of(l, p, rank);
        for (int64_t k = 0; k < info.numel_in_shard; k++) {
            float wanted = number(tensors[p], place_of(m->tp, &params[param_of(h, p)], info.intra_param_start + k));
            for (int step = -1; step < steps; step++) { /* each step rounds */
                unsigned char narrow[sizeof wanted];
                wanted += step >= 0;
                fc_cast(FC_F32, &wanted, array->dtype, narrow, 1);
                fc_cast(array->dtype, narrow, FC_F32, &wanted, 1);
            }
            if (got[info.offset_in_shard + k] != wanted) {
                return fc_fail(err, FC_ECORRUPT, "%s: element %lld is %g, not %g", l->params[p].fqn,
                               (long long)(info.intra_param_start + k), (double)got[info.offset_in_shard + k],
                               (double)wanted);
            }
        }
    }
    return FC_OK;
}

static fc_code check_value(const state_model *m, const fc_array *array, int tensor, fc_error *err) {
    const size_t count = (size_t)fc_array_numel(array);
    unsigned char bytes[MOST * sizeof(double)];
    float got[MOST] = {0};
    FC_TRY(array->device->copy(array->device, bytes, array->data, fc_array_bytes(array), NULL, err));
    FC_TRY(fc_comm_wait(m->shard, NULL, err));
    fc_cast(array->dtype, bytes, FC_F32, got, count);
    for (size_t k = 0; k < count; k++) {
        float wanted = number(tensor, (int64_t)k);
        fc_cast(FC_F32, &wanted, array->dtype, bytes, 1);
        fc_cast(array->dtype, bytes, FC_F32, &wanted, 1);
        if (got[k] != wanted) {
            return fc_fail(err, FC_ECORRUPT, "value %d: element %zu is %g", tensor, k, (double)got[k]);
        }
    }
    return FC_OK;
}

fc_code state_model_check(const state_model *m, int steps, fc_error *err) {
    for (int h = 0; h < STATE_HANDLES && m->handles[h]; h++) {
        int of_params[PARAMS] = {0}, of_states[2][PARAMS] = {{0}};
        const int count = (int)fc_fsdp_layout(m->handles[h])->nparams;
        for (int i = 0; i < count; i++) {
            of_params[i] = param_of(h, (size_t)i);
            of_states[0][i] = 3 * h + 1 + i;
            of_states[1][i] = 3 * h + 6 + i;
        }
        FC_TRY(check_array(m, h, of_params, fc_fsdp_local_shard(m->handles[h]), steps, err));
        FC_TRY(check_array(m, h, of_states[0], &m->states[2 * h], steps, err));
        FC_TRY(check_array(m, h, of_states[1], &m->states[2 * h + 1], steps, err));
    }
    for (int i = 0; i < STATE_VALUES; i++) {
        FC_TRY(check_value(m, &m->values[i], 7 + i, err));
    }
    return check_value(m, &m->buffer->array, 11, err);
}
