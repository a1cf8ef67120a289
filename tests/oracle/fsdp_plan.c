/*
 * Adds the units of a scenario by a wrap policy: names to a module tree, a policy that knows the options of each unit,
 * and the plan to the step.
 */
#include "fsdp_run.h"

#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

/* The names of torch's model: the root's own parameters are in a module "own". */
static void module_name(size_t unit, char *out) {
    snprintf(out, NAME_MAX_BYTES, unit == 0 ? "own" : "children_.%zu", unit - 1);
}

/* Describes all parameters for a module tree. */
static fc_code make_tree(const rank_run *r, fc_arena *arena, fc_module_tree *out, fc_error *err) {
    fc_parameter_spec *specs = fc_arena_calloc(arena, MOST_UNITS * MOST_PARAMS, sizeof *specs);
    const char **frozen = fc_arena_calloc(arena, MOST_UNITS * MOST_PARAMS + 1, sizeof *frozen);
    int64_t *shapes = fc_arena_calloc(arena, MOST_UNITS * MOST_PARAMS * FC_MAX_DIMS, sizeof *shapes);
    const json_t *unit, *param, *size;
    size_t count = 0, nfrozen = 0, u, p, d;
    json_array_foreach(json_object_get(r->scenario, "units"), u, unit) {
        json_array_foreach(json_object_get(unit, "params"), p, param) {
            char module[NAME_MAX_BYTES], name[2 * NAME_MAX_BYTES];
            fc_parameter_spec *s = &specs[count];
            int64_t *shape = &shapes[count * FC_MAX_DIMS];
            module_name(u, module);
            snprintf(name, sizeof name, "%s.%s", module, string_of(param, "fqn"));
            *s = (fc_parameter_spec){
                .fqn = fc_arena_strndup(arena, name, strlen(name)), .dtype = FC_F32, .shape = shape};
            dtype_of(param, "dtype", &s->dtype);
            json_array_foreach(json_object_get(param, "shape"), d, size) {
                shape[d] = json_integer_value(size);
            }
            s->ndim = (int)json_array_size(json_object_get(param, "shape"));
            if (json_object_get(param, "shared_with")) {
                s->tied_to = specs[count - p + (size_t)integer_of(param, "shared_with")].fqn;
            }
            if (is_true(param, "frozen")) {
                frozen[nfrozen++] = s->fqn;
            }
            count++;
        }
    }
    fc_model_info info = {.frozen = frozen};
    return fc_module_tree_new(specs, count, &info, arena, out, err);
}

static fc_unit_options planned_options(const rank_run *r, const json_t *spec) {
    fc_unit_options o = {.strategy = strategy_setting(r, spec),
                         .prefetch = prefetch_setting(r, spec),
                         .use_orig_params = is_true(r->scenario, "use_orig_params"),
                         .cpu_offload = json_is_true(setting(r, spec, "offload")),
                         .forward_prefetch = json_is_true(setting(r, spec, "forward_prefetch"))};
    o.mixed_precision = dtype_setting(r, spec, "param_dtype", &o.param_dtype);
    o.mixed_precision = dtype_setting(r, spec, "reduce_dtype", &o.reduce_dtype) || o.mixed_precision;
    o.buffer_dtype = FC_OPAQUE;
    return o;
}

size_t run_unit(const rank_run *r, const char *text, size_t len) {
    size_t i = json_array_size(json_object_get(r->scenario, "units"));
    char name[NAME_MAX_BYTES];
    while (i-- > 1) {
        module_name(i, name);
        if (strlen(name) == len && memcmp(name, text, len) == 0) {
            return i;
        }
    }
    return 0;
}

const json_t *run_spec(const rank_run *r, size_t unit) {
    return json_array_get(json_object_get(r->scenario, "units"), unit);
}

static fc_code choose_module(const fc_module_tree *tree, uint32_t m, void *context, fc_wrap_choice *choice,
                             fc_error *err) {
    const rank_run *r = context;
    size_t unit = run_unit(r, tree->modules[m].fqn.text, tree->modules[m].fqn.len);
    (void)err;
    if (unit > 0) {
        *choice = (fc_wrap_choice){true, ~0u, planned_options(r, run_spec(r, unit))};
    }
    return FC_OK;
}

static fc_code load_planned(void *context, const fc_parameter *parameter, fc_fsdp_tensor *out, fc_error *err) {
    rank_run *r = context;
    const char *dot = strrchr(parameter->fqn, '.');
    size_t unit = run_unit(r, parameter->fqn, (size_t)(dot - parameter->fqn)), p;
    const json_t *param;
    fc_fsdp_param_init unused;
    json_array_foreach(json_object_get(run_spec(r, unit), "params"), p, param) {
        if (strcmp(string_of(param, "fqn"), dot + 1) == 0) {
            FC_TRY(read_param(r, &r->units[unit], p, param, &unused, err));
            *out = r->units[unit].tensors[p]; /* the library frees it */
            r->units[unit].tensors[p].local.memory = NULL;
            return FC_OK;
        }
    }
    return fc_fail(err, FC_EUSAGE, "no parameter %s", parameter->fqn);
}

static fc_code adjust_planned(void *context, const fc_unit *unit, fc_fsdp_unit_options *options, fc_error *err) {
    const rank_run *r = context;
    size_t i = run_unit(r, unit->fqn, strlen(unit->fqn));
    (void)err;
    options->keep_low_precision_grads = is_true(r->scenario, "keep_low_precision_grads");
    choose_groups(r, run_spec(r, i), &options->shard, &options->replicate);
    return FC_OK;
}

/* Makes a plan and adds its units; they go to the places that they have in the scenario. */
static fc_code add_planned(rank_run *r, fc_arena *arena, fc_error *err) {
    fc_fsdp_unit *units[MOST_UNITS];
    fc_fsdp_handle *handles[MOST_UNITS];
    fc_unit_options root = planned_options(r, run_spec(r, 0));
    fc_module_tree tree;
    fc_wrap_targets targets;
    fc_units planned;
    FC_TRY(make_tree(r, arena, &tree, err));
    FC_TRY(fc_wrap_targets_new(&tree, &root, arena, &targets, err));
    FC_TRY(fc_wrap_custom(&targets, choose_module, r, err));
    FC_TRY(fc_wrap_check_frozen(&targets, NULL, NULL, err));
    FC_TRY(fc_wrap_check_shared(&targets, err));
    FC_TRY(fc_wrap_units(&targets, arena, &planned, err));
    fc_fsdp_plan plan = {&tree, &planned, load_planned, NULL, adjust_planned, r};
    FC_TRY(fc_fsdp_add_planned(r->fsdp, &plan, units, handles, err));
    r->nunits = planned.count;
    for (size_t i = 0; i < planned.count; i++) {
        size_t k = run_unit(r, planned.units[i].fqn, strlen(planned.units[i].fqn));
        r->units[k].unit = units[i];
        r->units[k].handle = handles[i];
        r->units[k].spec = run_spec(r, k);
    }
    return FC_OK;
}

fc_code run_plan(rank_run *r, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_code rc = arena ? add_planned(r, arena, err) : fc_fail(err, FC_ENOMEM, "out of memory");
    fc_arena_free(arena);
    return rc;
}
