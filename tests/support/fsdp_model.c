/*
 * A model for tests of the FSDP step, see fsdp_model.h.
 */
#include "fsdp_model.h"

#include <stdio.h>
#include <string.h>

static void on_event(void *context, const fc_fsdp_event *event) {
    fsdp_model *m = context;
    size_t used = strlen(m->trace);
    if (event->action == FC_ACTION_WAIT) {
        snprintf(m->trace + used, sizeof m->trace - used, "%s<%s ", fc_fsdp_stream_name(event->stream),
                 fc_fsdp_stream_name(event->other));
    } else {
        snprintf(m->trace + used, sizeof m->trace - used, "%s:%s ", fc_fsdp_action_name(event->action),
                 fc_fsdp_unit_name(event->handle));
    }
}

static void on_warning(void *context, const char *message) {
    fsdp_model *m = context;
    snprintf(m->warning, sizeof m->warning, "%s", message);
}

static fc_code add_unit(fsdp_model *m, fc_device *device, int i, int rank, fc_fsdp_unit_options options,
                        fc_error *err) {
    float values[MODEL_NUMEL];
    char name[16];
    int64_t size = MODEL_NUMEL;
    fc_fsdp_tensor tensor = {0};
    fc_dtype dtype = options.has_param_dtype ? options.param_dtype : FC_F32;
    fc_array number = {0};
    options.is_root = i == 0;
    snprintf(name, sizeof name, "unit%d", i);
    fc_code rc = fc_fsdp_add_unit(m->fsdp, name, &options, &m->units[i], err);
    rc = rc == FC_OK ? fc_array_new(device, FC_F32, 1, &size, &tensor.local, err) : rc;
    rc = rc == FC_OK ? fc_array_new(device, FC_F32, 1, &size, &number, err) : rc;
    rc = rc == FC_OK ? fc_array_new(device, dtype, 1, &size, &m->inputs[i], err) : rc;
    for (int k = 0; k < MODEL_NUMEL; k++) {
        values[k] = (float)(k + 100 * i) / 16;
    }
    rc = rc == FC_OK ? device->copy(device, tensor.local.data, values, sizeof values, NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    for (int k = 0; k < MODEL_NUMEL; k++) {
        values[k] = (float)(rank * 8 + k % 5) / 4;
    }
    rc = rc == FC_OK ? device->copy(device, number.data, values, sizeof values, NULL, err) : rc;
    rc = rc == FC_OK ? device->cast(device, FC_F32, number.data, dtype, m->inputs[i].data, MODEL_NUMEL, NULL, err) : rc;
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    fc_fsdp_param_init param = {"weight", &tensor, true, -1};
    rc = rc == FC_OK ? fc_fsdp_add_handle(m->units[i], &param, 1, &m->handles[i], err) : rc;
    fc_array_free(&tensor.local);
    fc_array_free(&number);
    return rc;
}

fc_code model_open_each(fsdp_model *m, fc_comm *shard, fc_comm *replicate, int rank, fc_fsdp_options options,
                        const fc_fsdp_unit_options *units, fc_error *err) {
    memset(m, 0, sizeof *m);
    options.trace = on_event;
    options.warn = on_warning;
    options.context = m;
    fc_code rc = fc_fsdp_new(shard, replicate, NULL, &options, &m->fsdp, err);
    for (int i = 0; rc == FC_OK && i < MODEL_UNITS; i++) {
        rc = add_unit(m, shard->device, i, rank, units[i], err);
    }
    return rc;
}

fc_code model_open(fsdp_model *m, fc_comm *shard, fc_comm *replicate, int rank, fc_fsdp_options options,
                   fc_fsdp_unit_options unit, fc_error *err) {
    const fc_fsdp_unit_options units[MODEL_UNITS] = {unit, unit, unit, unit};
    return model_open_each(m, shard, replicate, rank, options, units, err);
}

void model_close(fsdp_model *m) {
    fc_fsdp_free(m->fsdp);
    for (int i = 0; i < MODEL_UNITS; i++) {
        fc_array_free(&m->inputs[i]);
    }
}

static int unit_at(const int *order, int place) {
    return order ? order[place] : place + 1;
}

fc_code model_forward(fsdp_model *m, const int *order, fc_error *err) {
    fc_fsdp_tensor t;
    fc_code rc = fc_fsdp_root_pre_forward(m->fsdp, NULL, 0, err);
    rc = rc == FC_OK ? fc_fsdp_pre_forward(m->units[0], true, NULL, 0, err) : rc;
    for (int k = 0; rc == FC_OK && k < MODEL_UNITS - 1; k++) {
        int i = unit_at(order, k);
        rc = fc_fsdp_pre_forward(m->units[i], true, NULL, 0, err);
        rc = rc == FC_OK ? fc_fsdp_param(m->handles[i], 0, &t, err) : rc;
        rc = rc == FC_OK ? fc_fsdp_post_forward(m->units[i], err) : rc;
    }
    return rc == FC_OK ? fc_fsdp_post_forward(m->units[0], err) : rc;
}

static fc_code unit_backward(fsdp_model *m, int i, fc_error *err) {
    fc_array grad;
    fc_fsdp_tensor weight;
    fc_device *device = m->inputs[i].device;
    fc_code rc = fc_fsdp_pre_backward(m->units[i], err);
    rc = rc == FC_OK ? fc_fsdp_grad(m->handles[i], 0, &grad, err) : rc;
    rc = rc == FC_OK ? fc_fsdp_param(m->handles[i], 0, &weight, err) : rc;
    rc = rc == FC_OK ? fc_array_copy(&grad, &weight.local, NULL, err) : rc;
    rc = rc == FC_OK ? device->add(device, grad.dtype, grad.data, m->inputs[i].data, MODEL_NUMEL, NULL, err) : rc;
    return rc == FC_OK ? fc_fsdp_post_backward(m->handles[i], err) : rc;
}

fc_code model_backward(fsdp_model *m, const int *order, fc_error *err) {
    fc_code rc = fc_fsdp_pre_backward(m->units[0], err);
    for (int k = MODEL_UNITS - 1; rc == FC_OK && k-- > 0;) {
        rc = unit_backward(m, unit_at(order, k), err);
    }
    rc = rc == FC_OK ? unit_backward(m, 0, err) : rc;
    return rc == FC_OK ? fc_fsdp_post_backward_final(m->fsdp, err) : rc;
}

fc_code model_optimize(fsdp_model *m, fc_error *err) {
    fc_code rc = FC_OK;
    for (int i = 0; rc == FC_OK && i < MODEL_UNITS; i++) {
        fc_array *shard = fc_fsdp_local_shard(m->handles[i]), *grad = fc_fsdp_sharded_grad(m->handles[i]);
        if (grad) {
            rc = shard->device->add(shard->device, shard->dtype, shard->data, grad->data, (size_t)shard->sizes[0], NULL,
                                    err);
        }
    }
    return rc == FC_OK ? fc_fsdp_zero_grad(m->fsdp, err) : rc;
}

void model_clear(fsdp_model *m) {
    m->trace[0] = 0;
}

const char *model_events(const fsdp_model *m, const char *const *actions) {
    static _Thread_local char words[sizeof m->trace];
    char copy[sizeof m->trace], *save = NULL;
    memcpy(copy, m->trace, sizeof copy);
    words[0] = 0;
    for (char *word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        for (const char *const *a = actions; *a; a++) {
            size_t n = strlen(*a), used = strlen(words);
            if (strncmp(word, *a, n) == 0 && word[n] == ':') {
                snprintf(words + used, sizeof words - used, "%s%s", used ? " " : "", word);
            }
        }
    }
    return words;
}
