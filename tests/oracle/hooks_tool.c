/*
 * hooks_tool: runs forwards with mixed precision as scenarios on stdin say, and prints the dtypes and values that each
 * module sees, for fsdp_hooks.py to compare with PyTorch's FSDP. A wrap policy makes the units. A module adds its
 * parameter to its input, in the wider of the two dtypes.
 */
#include "fsdp_run.h"

#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PER_MODULE = 3 }; /* a parameter p, a buffer b, and a count n */

typedef struct forward_run {
    const json_t *scenario, *modules;
    fc_comm *comm;
    fc_arena *arena;
    fc_module_tree tree;
    fc_units plan;
    fc_fsdp *fsdp;
    fc_fsdp_unit *units[MOST_UNITS];
    fc_fsdp_handle *handles[MOST_UNITS];
    fc_fsdp_buffer *buffers[MOST_UNITS * PER_MODULE];
    json_t *seen, *saved;
} forward_run;

static json_t *described(const fc_array *array) {
    size_t bytes = fc_array_bytes(array);
    char *text = calloc(1, 2 * bytes + 1);
    for (size_t i = 0; text && i < bytes; i++) {
        snprintf(text + 2 * i, 3, "%02x", ((const unsigned char *)array->data)[i]);
    }
    json_t *pair = json_pack("[s,s]", fc_dtype_get(array->dtype)->torch_name, text ? text : "");
    free(text);
    return pair;
}

/* "layers.3.p" → the description of module 3 */
static const json_t *module_of(const forward_run *r, const char *fqn) {
    return json_array_get(r->modules, strtoul(strchr(fqn, '.') + 1, NULL, 10));
}

static fc_code load(void *context, const fc_parameter *parameter, fc_fsdp_tensor *out, fc_error *err) {
    const forward_run *r = context;
    const char *hex = string_of(module_of(r, parameter->fqn), strrchr(parameter->fqn, '.') + 1);
    FC_TRY(fc_array_new(r->comm->device, parameter->dtype, parameter->ndim, parameter->shape, &out->local, err));
    bytes_of_hex(hex, out->local.data, fc_array_bytes(&out->local));
    return FC_OK;
}

static fc_code make_tree(forward_run *r, fc_error *err) {
    static const char *const names[PER_MODULE] = {"p", "b", "n"};
    static int64_t shape[1];
    const char *last[] = {"b", "n", NULL};
    size_t count = json_array_size(r->modules), k = 0;
    fc_parameter_spec *specs = fc_arena_calloc(r->arena, count * PER_MODULE, sizeof *specs);
    fc_class_rule *rules = fc_arena_calloc(r->arena, count, sizeof *rules);
    shape[0] = integer_of(r->scenario, "numel");
    for (size_t i = 0; specs && rules && i < count; i++) {
        const char **class = fc_arena_calloc(r->arena, 2, sizeof *class);
        char name[NAME_MAX_BYTES];
        snprintf(name, sizeof name, "layers.%zu", i);
        class[0] = string_of(json_array_get(r->modules, i), "class");
        rules[i] = (fc_class_rule){fc_arena_strndup(r->arena, name, strlen(name)), class, 1};
        for (int j = 0; j < PER_MODULE; j++, k++) {
            char fqn[2 * NAME_MAX_BYTES];
            snprintf(fqn, sizeof fqn, "%s.%s", name, names[j]);
            specs[k] = (fc_parameter_spec){.fqn = fc_arena_strndup(r->arena, fqn, strlen(fqn)),
                                           .dtype = j < 2 ? FC_F32 : FC_I64,
                                           .ndim = j<2, .shape = shape, .buffer = j> 0};
        }
    }
    fc_model_info info = {.classes = rules, .nclasses = count, .buffers = last};
    return fc_module_tree_new(specs, k, &info, r->arena, &r->tree, err);
}

static fc_unit_options options_of(const json_t *spec) {
    fc_unit_options o = {.mixed_precision = true,
                         .cast_forward_inputs = is_true(spec, "cast_forward_inputs"),
                         .no_cast_root_forward_inputs =
                             json_is_false(json_object_get(spec, "cast_root_forward_inputs"))};
    o.param_dtype = o.reduce_dtype = o.buffer_dtype = FC_OPAQUE;
    dtype_of(spec, "param_dtype", &o.param_dtype);
    dtype_of(spec, "buffer_dtype", &o.buffer_dtype);
    return o;
}

static fc_code choose(const fc_module_tree *tree, uint32_t m, void *context, fc_wrap_choice *choice, fc_error *err) {
    const forward_run *r = context;
    const json_t *options;
    (void)err;
    if (m > 0 && fc_module_is_instance(&tree->modules[m], (const char *const[]){"Plain", "Norm", NULL})) {
        options = json_object_get(module_of(r, tree->modules[m].fqn.text), "options");
        choice->wrap = is_true(module_of(r, tree->modules[m].fqn.text), "wrap");
        choice->set = options ? FC_UNIT_SET_MIXED_PRECISION : 0;
        choice->options = options ? options_of(options) : (fc_unit_options){0};
    }
    return FC_OK;
}

static fc_code build(forward_run *r, fc_error *err) {
    static const char *const fp32[] = {"Norm", NULL};
    fc_unit_options root = options_of(json_object_get(r->scenario, "root"));
    fc_wrap_targets targets;
    const char *const *overridden;
    fc_fsdp_options options = {0};
    FC_TRY(make_tree(r, err));
    FC_TRY(fc_wrap_targets_new(&r->tree, &root, r->arena, &targets, err));
    FC_TRY(fc_wrap_custom(&targets, choose, r, err));
    FC_TRY(fc_wrap_override_mixed_precision(&targets, fp32, r->arena, &overridden, err));
    FC_TRY(fc_wrap_units(&targets, r->arena, &r->plan, err));
    FC_TRY(fc_fsdp_new(r->comm, NULL, NULL, &options, &r->fsdp, err));
    fc_fsdp_plan plan = {.tree = &r->tree, .units = &r->plan, .load = load, .buffers = r->buffers, .context = r};
    return fc_fsdp_add_planned(r->fsdp, &plan, r->units, r->handles, err);
}

/* Finds the unit with the parameter of module `i`, and its place in there. */
static size_t find_unit(const forward_run *r, size_t i, size_t *param) {
    char fqn[NAME_MAX_BYTES];
    snprintf(fqn, sizeof fqn, "layers.%zu.p", i);
    for (size_t u = 0; u < r->plan.count; u++) {
        for (size_t k = 0; k < r->plan.units[u].nparameters; k++) {
            if (strcmp(r->tree.parameters[r->plan.units[u].parameters[k]].fqn, fqn) == 0) {
                *param = k;
                return u;
            }
        }
    }
    abort();
}

static fc_code widen(fc_array *array, fc_dtype dtype, fc_array *out, fc_error *err) {
    FC_TRY(fc_array_new(array->device, dtype, array->ndim, array->sizes, out, err));
    return array->device->cast(array->device, array->dtype, array->data, dtype, out->data,
                               (size_t)fc_array_numel(array), NULL, err);
}

/* x = x + p, like torch: two dtypes of one size meet in float32. */
static fc_code compute(fc_array *x, fc_array *p, fc_error *err) {
    size_t a = fc_dtype_size(x->dtype), b = fc_dtype_size(p->dtype);
    fc_dtype dtype = x->dtype == p->dtype || a > b ? x->dtype : a < b ? p->dtype : FC_F32;
    fc_array left = {0}, right = {0};
    fc_code rc;
    FC_TRY_GOTO(widen(x, dtype, &left, err), rc, out);
    FC_TRY_GOTO(widen(p, dtype, &right, err), rc, out);
    rc = left.device->add(left.device, dtype, left.data, right.data, (size_t)fc_array_numel(&left), NULL, err);
    fc_array_free(x);
    *x = left;
    left = (fc_array){0};
out:
    fc_array_free(&left);
    fc_array_free(&right);
    return rc;
}

/* Calls one of the functions that cast `x`, and frees what it replaces. */
typedef fc_code (*casting_fn)(fc_fsdp_unit *unit, fc_array *x, fc_error *err);

static fc_code cast_before(fc_fsdp_unit *unit, fc_array *x, fc_error *err) {
    return fc_fsdp_pre_forward(unit, true, x, 1, err);
}

static fc_code cast_after(fc_fsdp_unit *unit, fc_array *x, fc_error *err) {
    return fc_fsdp_cast_outputs(unit, x, 1, err);
}

static fc_code casting(casting_fn call, fc_fsdp_unit *unit, fc_array *x, fc_error *err) {
    fc_array before = *x;
    fc_code rc = call(unit, x, err);
    if (x->memory != before.memory) {
        fc_array_free(&before);
    }
    return rc;
}

static fc_code run_module(forward_run *r, size_t i, fc_array *x, fc_error *err) {
    size_t param, u = find_unit(r, i, &param);
    bool own = u + 1 < r->plan.count; /* else the root's */
    fc_fsdp_tensor p;
    const fc_fsdp_buffer *const *b = (const fc_fsdp_buffer *const *)&r->buffers[i * PER_MODULE + 1];
    if (own) {
        FC_TRY(casting(cast_before, r->units[u], x, err));
    }
    json_array_append_new(r->seen,
                          json_pack("[o,o,o]", described(x), described(&b[0]->array), described(&b[1]->array)));
    FC_TRY(fc_fsdp_param(r->handles[u], param, &p, err));
    FC_TRY(compute(x, &p.local, err));
    if (own) {
        FC_TRY(casting(cast_after, r->units[u], x, err));
        FC_TRY(fc_fsdp_post_forward(r->units[u], err));
    }
    return FC_OK;
}

static fc_code run_forward(forward_run *r, const json_t *input, fc_array *x, fc_error *err) {
    fc_fsdp_unit *root = r->units[r->plan.count - 1];
    fc_dtype dtype;
    int64_t numel = integer_of(r->scenario, "numel");
    dtype_of(input, "dtype", &dtype);
    FC_TRY(fc_array_new(r->comm->device, dtype, 1, &numel, x, err));
    bytes_of_hex(string_of(input, "x"), x->data, fc_array_bytes(x));
    fc_array before = *x;
    FC_TRY(fc_fsdp_root_pre_forward(r->fsdp, x, 1, err));
    if (x->memory != before.memory) {
        fc_array_free(&before);
    }
    FC_TRY(casting(cast_before, root, x, err));
    for (size_t i = 0; i < json_array_size(r->modules); i++) {
        FC_TRY(run_module(r, i, x, err));
    }
    FC_TRY(fc_fsdp_post_forward(root, err));
    json_array_append_new(r->seen, described(x));
    return FC_OK;
}

static fc_code save(forward_run *r, fc_error *err) {
    for (size_t i = 0; i < r->tree.nparameters; i++) {
        fc_array full;
        if (r->buffers[i]) {
            FC_TRY(fc_fsdp_saved_buffer(r->fsdp, r->buffers[i], &full, err));
            json_array_append_new(r->saved, described(&full));
            fc_array_free(&full);
        }
    }
    return FC_OK;
}

static fc_code run(forward_run *r, fc_error *err) {
    const json_t *inputs = json_object_get(r->scenario, "inputs"), *input;
    size_t i;
    FC_TRY(build(r, err));
    fc_fsdp_set_grad_enabled(r->fsdp, false);
    json_array_foreach(inputs, i, input) {
        fc_array x = {0};
        fc_code rc = run_forward(r, input, &x, err);
        fc_array_free(&x);
        FC_TRY(rc);
    }
    return save(r, err);
}

static fc_code run_rank(fc_comm *comm, void *context, fc_error *err) {
    forward_run *r = calloc(1, sizeof *r), *answer = context;
    if (!r) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    *r = (forward_run){.scenario = answer->scenario, .comm = comm, .arena = fc_arena_new()};
    r->modules = json_object_get(r->scenario, "modules");
    r->seen = json_array();
    r->saved = json_array();
    fc_code rc = r->arena ? run(r, err) : fc_fail(err, FC_ENOMEM, "out of memory");
    fc_fsdp_free(r->fsdp);
    fc_arena_free(r->arena);
    if (comm->rank == 0) { /* the ranks see the same */
        answer->seen = r->seen;
        answer->saved = r->saved;
    } else {
        json_decref(r->seen);
        json_decref(r->saved);
    }
    free(r);
    return rc;
}

int main(void) {
    json_t *scenarios = json_loadf(stdin, 0, NULL), *out = json_array(), *scenario;
    size_t i;
    json_object_seed(0); /* before threads use objects */
    json_array_foreach(scenarios, i, scenario) {
        forward_run answer = {.scenario = scenario};
        fc_error err = {FC_OK, ""};
        fc_code rc = fc_device_run_local(2, run_rank, &answer, &err);
        json_array_append_new(out, json_pack("{s:o,s:o,s:s,s:i}", "seen", answer.seen, "saved", answer.saved, "error",
                                             err.message, "code", (int)rc));
    }
    json_dumpf(out, stdout, JSON_COMPACT);
    json_decref(out);
    json_decref(scenarios);
    return 0;
}
