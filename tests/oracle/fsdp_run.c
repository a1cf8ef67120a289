/*
 * Reads a scenario, see fsdp_run.h.
 */
#include "fsdp_run.h"

#include <stdlib.h>
#include <string.h>

const char *string_of(const json_t *object, const char *key) {
    return json_string_value(json_object_get(object, key));
}

int64_t integer_of(const json_t *object, const char *key) {
    return json_integer_value(json_object_get(object, key));
}

bool is_true(const json_t *object, const char *key) {
    return json_is_true(json_object_get(object, key));
}

bool dtype_of(const json_t *object, const char *key, fc_dtype *out) {
    const char *name = string_of(object, key);
    return name && fc_dtype_find(name, strlen(name), out);
}

void bytes_of_hex(const char *hex, void *out, size_t bytes) {
    for (size_t i = 0; hex && i < bytes && hex[2 * i]; i++) {
        char pair[3] = {hex[2 * i], hex[2 * i + 1], 0};
        ((unsigned char *)out)[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
}

static int index_of(const char *const *names, int count, const char *name) {
    for (int i = 0; name && i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return 0;
}

const json_t *setting(const rank_run *r, const json_t *spec, const char *key) {
    const json_t *own = json_object_get(json_object_get(spec, "options"), key);
    return own ? own : json_object_get(r->scenario, key);
}

bool dtype_setting(const rank_run *r, const json_t *spec, const char *key, fc_dtype *out) {
    const char *name = json_string_value(setting(r, spec, key));
    *out = FC_OPAQUE;
    return name && fc_dtype_find(name, strlen(name), out);
}

fc_sharding_strategy strategy_setting(const rank_run *r, const json_t *spec) {
    static const char *const names[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                        "_HYBRID_SHARD_ZERO2"};
    return (fc_sharding_strategy)index_of(names, 5, json_string_value(setting(r, spec, "strategy")));
}

fc_backward_prefetch prefetch_setting(const rank_run *r, const json_t *spec) {
    static const char *const names[] = {"NONE", "PRE", "POST"};
    static const fc_backward_prefetch values[] = {FC_BACKWARD_PREFETCH_NONE, FC_BACKWARD_PREFETCH_PRE,
                                                  FC_BACKWARD_PREFETCH_POST};
    return values[index_of(names, 3, json_string_value(setting(r, spec, "backward_prefetch")))];
}

void choose_groups(const rank_run *r, const json_t *spec, fc_comm **shard, fc_comm **replicate) {
    static const char *const names[] = {"world", "neighbours", "across", "hybrid"};
    const json_t *name = setting(r, spec, "group");
    int g = index_of(names, 4, json_string_value(name));
    if (!name && integer_of(r->scenario, "replicas") > 1) {
        g = 3;
    }
    *shard = r->groups[g == 3 ? GROUP_NEIGHBOURS : g];
    *replicate = g == 3 ? r->groups[GROUP_ACROSS] : NULL;
}

fc_code read_param(rank_run *r, unit_run *u, size_t i, const json_t *spec, fc_fsdp_param_init *out, fc_error *err) {
    int64_t shape[FC_MAX_DIMS];
    json_t *sizes = json_object_get(spec, "shape"), *strides = json_object_get(spec, "strides");
    fc_dtype dtype = FC_F32;
    int ndim = (int)json_array_size(sizes);
    for (int d = 0; d < ndim; d++) {
        shape[d] = json_integer_value(json_array_get(sizes, (size_t)d));
    }
    dtype_of(spec, "dtype", &dtype);
    *out = (fc_fsdp_param_init){string_of(spec, "fqn"), &u->tensors[i], !is_true(spec, "frozen"), -1};
    if (json_object_get(spec, "shared_with")) {
        out->shared_with = integer_of(spec, "shared_with");
        u->tensors[i] = u->tensors[out->shared_with];
        u->tensors[i].local.memory = NULL;
        return FC_OK;
    }
    fc_array *local = &u->tensors[i].local;
    fc_code rc = fc_array_new(r->comm->device, dtype, ndim, shape, local, err);
    const json_t *bytes = json_object_get(spec, "bytes");
    if (json_is_array(bytes)) { /* experts differ */
        bytes = json_array_get(bytes, (size_t)r->comm->rank);
    }
    if (rc == FC_OK) {
        bytes_of_hex(json_string_value(bytes), local->data, fc_array_bytes(local));
    }
    for (int d = 0; rc == FC_OK && d < ndim && strides; d++) {
        local->strides[d] = json_integer_value(json_array_get(strides, (size_t)d));
    }
    return rc;
}
