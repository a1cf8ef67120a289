/*
 * fsdp_tool: runs FSDP steps as scenarios on stdin say, with ranks as threads, and prints what every rank held, for
 * fsdp_step.py and flat_param.py to compare with PyTorch's FSDP. A scenario is JSON (see fsdp_scenarios.py); arrays are
 * their bytes in hexadecimal. The forward runs the units in the order of each
 * step, the root around them, the backward as its calls say. Units are added one by one or, if the scenario says
 * "planned", by a wrap policy.
 */
#include "fsdp_run.h"

#include "fsdpckpt/try.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *hex_of(const fc_array *array) {
    size_t bytes = fc_array_bytes(array);
    fc_array dense = {0};
    char *text = malloc(2 * bytes + 1);
    if (!text || fc_array_clone(array, NULL, &dense, NULL) != FC_OK) {
        abort();
    }
    text[0] = 0;
    for (size_t i = 0; i < bytes; i++) {
        snprintf(text + 2 * i, 3, "%02x", ((unsigned char *)dense.data)[i]);
    }
    json_t *string = json_string(text);
    free(text);
    fc_array_free(&dense);
    return string;
}

/* Returns the name of a unit in the scenario. A planned one has the name of its module. */
static const char *run_unit_name(const rank_run *r, const fc_fsdp_handle *handle) {
    const char *name = fc_fsdp_unit_name(handle);
    return is_true(r->scenario, "planned") ? string_of(run_spec(r, run_unit(r, name, strlen(name))), "name") : name;
}

static void on_event(void *context, const fc_fsdp_event *event) {
    static const fc_fsdp_action shown[] = {FC_ACTION_ALL_GATHER, FC_ACTION_REDUCE_SCATTER, FC_ACTION_ALL_REDUCE,
                                           FC_ACTION_FREE};
    rank_run *r = context;
    fc_fsdp_action action = event->action;
    bool sharded = event->handle && fc_fsdp_layout(event->handle)->world_size > 1;
    if (action == FC_ACTION_COMM_HOOK) { /* all hooks here communicate like this */
        action = sharded ? FC_ACTION_REDUCE_SCATTER : FC_ACTION_ALL_REDUCE;
    }
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        if (action == shown[i] && (sharded || action != FC_ACTION_FREE)) {
            json_array_append_new(r->trace,
                                  json_sprintf("%s %s", fc_fsdp_action_name(action), run_unit_name(r, event->handle)));
        }
    }
}

static void on_warning(void *context, const char *message) {
    rank_run *r = context;
    json_array_append_new(r->trace, json_sprintf("WARNING %s", message));
}

static fc_code add_unit(rank_run *r, const json_t *spec, fc_error *err) {
    const json_t *params = json_object_get(spec, "params");
    unit_run *u = &r->units[r->nunits];
    fc_fsdp_param_init init[MOST_PARAMS];
    fc_fsdp_unit_options options = {.is_root = r->nunits == 0,
                                    .strategy = strategy_setting(r, spec),
                                    .keep_low_precision_grads =
                                        json_is_true(setting(r, spec, "keep_low_precision_grads")),
                                    .offload_params = json_is_true(setting(r, spec, "offload")),
                                    .has_prefetch = true,
                                    .backward_prefetch = prefetch_setting(r, spec),
                                    .forward_prefetch = json_is_true(setting(r, spec, "forward_prefetch"))};
    options.has_param_dtype = dtype_setting(r, spec, "param_dtype", &options.param_dtype);
    options.has_reduce_dtype = dtype_setting(r, spec, "reduce_dtype", &options.reduce_dtype);
    choose_groups(r, spec, &options.shard, &options.replicate);
    u->spec = spec;
    r->nunits++;
    fc_code rc = fc_fsdp_add_unit(r->fsdp, string_of(spec, "name"), &options, &u->unit, err);
    size_t count = json_array_size(params);
    for (size_t i = 0; rc == FC_OK && i < count; i++) {
        rc = read_param(r, u, i, json_array_get(params, i), &init[i], err);
    }
    return rc == FC_OK && count > 0 ? fc_fsdp_add_handle(u->unit, init, count, &u->handle, err) : rc;
}

static fc_code add_units(rank_run *r, fc_error *err) {
    const json_t *units = json_object_get(r->scenario, "units");
    fc_code rc = FC_OK;
    if (is_true(r->scenario, "planned")) {
        return run_plan(r, err);
    }
    for (size_t i = 0; rc == FC_OK && i < json_array_size(units); i++) {
        rc = add_unit(r, json_array_get(units, i), err);
    }
    return rc;
}

static fc_code make_groups(rank_run *r, fc_error *err) {
    fc_mesh mesh = {.ndim = 2, .sizes = {2, r->comm->size / 2}};
    r->groups[GROUP_WORLD] = r->comm;
    if (r->comm->size != 4) {
        return FC_OK;
    }
    FC_TRY(fc_comm_split_mesh(r->comm, &mesh, 1, &r->groups[GROUP_NEIGHBOURS], err));
    return fc_comm_split_mesh(r->comm, &mesh, 0, &r->groups[GROUP_ACROSS], err);
}

static fc_code build(rank_run *r, fc_error *err) {
    const json_t *s = r->scenario;
    fc_fsdp_options options = {.use_orig_params = is_true(s, "use_orig_params"),
                               .check_order = is_true(s, "check_order"),
                               .warn = on_warning,
                               .trace = on_event,
                               .context = r};
    fc_comm *shard, *replicate;
    fc_code rc = make_groups(r, err);
    choose_groups(r, run_spec(r, 0), &shard, &replicate);
    rc = rc == FC_OK ? fc_fsdp_new(shard, replicate, NULL, &options, &r->fsdp, err) : rc;
    if (rc == FC_OK && string_of(s, "hook")) {
        fc_dtype dtype;
        fc_comm_hook hook = fc_reduce_scatter_hook();
        if (dtype_of(s, "hook", &dtype)) {
            hook = fc_compress_hook(dtype);
        }
        rc = fc_fsdp_register_comm_hook(r->fsdp, &hook, err);
    }
    return rc == FC_OK ? add_units(r, err) : rc;
}

static const char *last_component(const char *fqn) {
    const char *dot = strrchr(fqn, '.');
    return dot ? dot + 1 : fqn;
}

static json_t *describe_unit(const rank_run *r, const unit_run *u) {
    const fc_flat_layout *l = fc_fsdp_layout(u->handle);
    json_t *numels = json_array(), *padding = json_array(), *infos = json_array(), *shared = json_array();
    fc_comm *shard, *replicate;
    choose_groups(r, u->spec, &shard, &replicate);
    int64_t rank = l->world_size > 1 ? shard->rank : 0;
    for (size_t i = 0; i < l->nentries; i++) {
        json_array_append_new(numels, json_integer(l->numels_with_padding[i]));
        json_array_append_new(padding, json_boolean(l->is_padding[i]));
    }
    for (size_t i = 0; i < l->nparams; i++) {
        fc_flat_shard_info s = fc_flat_shard_of(l, i, rank);
        json_array_append_new(infos, s.in_shard ? json_pack("[I,I,I,I]", s.offset_in_shard, s.numel_in_shard,
                                                            s.intra_param_start, s.intra_param_end)
                                                : json_null());
    }
    for (size_t i = 0; i < l->nshared; i++) {
        const char *fqn = l->shared[i].fqn, *first = l->params[l->shared[i].primary].fqn;
        json_array_append_new(shared, json_pack("[s,s]", last_component(fqn), last_component(first)));
    }
    return json_pack("{s:o,s:o,s:o,s:o,s:I,s:I,s:o}", "numels", numels, "is_padding", padding, "infos", infos, "shared",
                     shared, "shard_numel", l->shard_numel, "padding", fc_flat_shard_padding(l, rank), "shard",
                     hex_of(fc_fsdp_local_shard(u->handle)));
}

/* What the forward of a unit sees. */
static fc_code show_params(rank_run *r, unit_run *u, json_t *out, fc_error *err) {
    (void)r;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < fc_fsdp_layout(u->handle)->nparams; i++) {
        fc_fsdp_tensor t;
        rc = fc_fsdp_param(u->handle, i, &t, err);
        if (rc == FC_OK) {
            json_array_append_new(out, hex_of(&t.local));
        }
    }
    return rc;
}

static fc_code forward(rank_run *r, const json_t *step, json_t *params, fc_error *err) {
    fc_code rc = fc_fsdp_root_pre_forward(r->fsdp, NULL, 0, err);
    const json_t *order = json_object_get(step, "order");
    rc = rc == FC_OK ? fc_fsdp_pre_forward(r->units[0].unit, true, NULL, 0, err) : rc;
    if (rc == FC_OK && r->units[0].handle) {
        rc = show_params(r, &r->units[0], params, err);
    }
    for (size_t i = 0; rc == FC_OK && i < json_array_size(order); i++) {
        unit_run *u = &r->units[json_integer_value(json_array_get(order, i))];
        rc = fc_fsdp_pre_forward(u->unit, true, NULL, 0, err);
        rc = rc == FC_OK ? show_params(r, u, params, err) : rc;
        rc = rc == FC_OK ? fc_fsdp_post_forward(u->unit, err) : rc;
    }
    return rc == FC_OK ? fc_fsdp_post_forward(r->units[0].unit, err) : rc;
}

/* The gradient of each parameter is given. */
static fc_code compute(unit_run *u, const json_t *grads, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < json_array_size(grads); i++) {
        fc_array view;
        rc = fc_fsdp_grad(u->handle, i, &view, err);
        if (rc == FC_OK) {
            fc_array dense = {0};
            rc = fc_array_new(view.device, view.dtype, view.ndim, view.sizes, &dense, err);
            if (rc == FC_OK) {
                bytes_of_hex(json_string_value(json_array_get(grads, i)), dense.data, fc_array_bytes(&dense));
                rc = fc_array_copy(&view, &dense, NULL, err);
            }
            fc_array_free(&dense);
        }
    }
    return rc;
}

static size_t unit_index(const rank_run *r, const char *name) {
    size_t i = r->nunits;
    while (i-- > 1 && strcmp(string_of(r->units[i].spec, "name"), name) != 0) {
    }
    return i < r->nunits ? i : 0;
}

/* "calls" says when which unit's pre- and post-backward come. */
static fc_code backward(rank_run *r, const json_t *step, fc_error *err) {
    const json_t *grads = json_array_get(json_object_get(step, "grads"), (size_t)r->comm->rank);
    const json_t *calls = json_object_get(step, "calls"), *call;
    fc_code rc = FC_OK;
    size_t k;
    json_array_foreach(calls, k, call) {
        size_t i = unit_index(r, json_string_value(json_array_get(call, 1)));
        unit_run *u = &r->units[i];
        if (strcmp(json_string_value(json_array_get(call, 0)), "pre") == 0) {
            rc = fc_fsdp_pre_backward(u->unit, err);
        } else {
            rc = compute(u, json_array_get(grads, i), err);
            rc = rc == FC_OK ? fc_fsdp_post_backward(u->handle, err) : rc;
        }
        if (rc != FC_OK) {
            return rc;
        }
    }
    return fc_fsdp_post_backward_final(r->fsdp, err);
}

/* "clip": [largest norm, type], where the type 0 is infinity. */
static fc_code clip(rank_run *r, fc_error *err) {
    const json_t *clip = json_object_get(r->scenario, "clip");
    double norm, type = json_number_value(json_array_get(clip, 1));
    if (!clip) {
        return FC_OK;
    }
    FC_TRY(fc_fsdp_clip_grad_norm(r->fsdp, json_number_value(json_array_get(clip, 0)), type == 0 ? INFINITY : type,
                                  &norm, err));
    uint64_t bits;
    memcpy(&bits, &norm, sizeof bits);
    json_array_append_new(json_object_get(r->result, "norms"), json_sprintf("%016llx", (unsigned long long)bits));
    return FC_OK;
}

static fc_code run_step(rank_run *r, const json_t *step, fc_error *err) {
    json_t *params = json_array(), *grads = json_array();
    fc_fsdp_set_sync_gradients(r->fsdp, is_true(step, "sync"));
    fc_code rc = is_true(step, "zero") ? fc_fsdp_zero_grad(r->fsdp, err) : FC_OK;
    rc = rc == FC_OK ? forward(r, step, params, err) : rc;
    rc = rc == FC_OK ? backward(r, step, err) : rc;
    rc = rc == FC_OK ? clip(r, err) : rc;
    for (size_t i = 0; rc == FC_OK && is_true(step, "sync") && i < r->nunits; i++) {
        const fc_array *grad = r->units[i].handle ? fc_fsdp_sharded_grad(r->units[i].handle) : NULL;
        json_array_append_new(grads, grad ? json_pack("[s,o]", fc_dtype_get(grad->dtype)->torch_name, hex_of(grad))
                                          : json_null());
    }
    json_array_append_new(json_object_get(r->result, "params"), params);
    json_array_append_new(json_object_get(r->result, "grads"), grads);
    return rc;
}

static void close_rank(rank_run *r) {
    fc_fsdp_free(r->fsdp);
    for (size_t i = 0; i < r->nunits; i++) {
        for (size_t k = 0; k < MOST_PARAMS; k++) {
            fc_array_free(&r->units[i].tensors[k].local);
        }
    }
    for (int g = GROUP_WORLD + 1; g < GROUP_COUNT; g++) {
        if (r->groups[g]) {
            r->groups[g]->free(r->groups[g]);
        }
    }
}

/* What the threads of one scenario share. */
typedef struct shared_run {
    const json_t *scenario;
    json_t **results;
} shared_run;

static fc_code run_rank(fc_comm *comm, void *context, fc_error *err) {
    shared_run *all = context;
    rank_run *r = calloc(1, sizeof *r);
    if (!r) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    r->scenario = all->scenario;
    r->comm = comm;
    r->trace = json_array();
    r->result = json_pack("{s:[],s:[],s:[],s:[],s:o}", "units", "params", "grads", "norms", "trace", r->trace);
    all->results[comm->rank] = r->result;
    const json_t *steps = json_object_get(r->scenario, "steps");
    fc_code rc = build(r, err);
    for (size_t i = 0; rc == FC_OK && i < r->nunits; i++) {
        json_array_append_new(json_object_get(r->result, "units"),
                              r->units[i].handle ? describe_unit(r, &r->units[i]) : json_null());
    }
    for (size_t i = 0; rc == FC_OK && i < json_array_size(steps); i++) {
        rc = run_step(r, json_array_get(steps, i), err);
    }
    close_rank(r);
    free(r);
    return rc;
}

static json_t *run_scenario(const json_t *scenario) {
    json_t *results[64] = {NULL}, *list = json_array();
    shared_run all = {scenario, results};
    fc_error err = {FC_OK, ""};
    int world = (int)integer_of(scenario, "world");
    fc_code rc = world <= 64 ? fc_device_run_local(world, run_rank, &all, &err) : FC_EUSAGE;
    for (int i = 0; i < world && i < 64; i++) {
        json_array_append_new(list, results[i] ? results[i] : json_null());
    }
    return json_pack("{s:o,s:s,s:i}", "ranks", list, "error", err.message, "code", (int)rc);
}

int main(void) {
    json_error_t problem;
    json_t *scenarios = json_loadf(stdin, 0, &problem), *out = json_array(), *scenario;
    size_t i;
    if (!scenarios) {
        fprintf(stderr, "fsdp_tool: %s\n", problem.text);
        return 2;
    }
    json_object_seed(0); /* before threads use objects */
    json_array_foreach(scenarios, i, scenario) {
        json_array_append_new(out, run_scenario(scenario));
    }
    json_dumpf(out, stdout, JSON_COMPACT);
    json_decref(out);
    json_decref(scenarios);
    return 0;
}
