/*
 * Gives the values of any source the names that Megatron-FSDP looks for: those of Megatron's modules, below the classes
 * that wrap the model, with SwiGLU's halves apart. Numbers of layers and experts stay in the names.
 */
#include "fsdp_dtensor/fsdp_dtensor.h"

#include "base/file_name.h"
#include "derived/derived.h"
#include "derived/optim_name.h"
#include "fsdp_dtensor/halves.h"
#include "fsdp_dtensor/optimizer.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "megatron/rules.h"
#include "torch_dist/adapting.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const fc_derived_kind adapted_kind = {.size = sizeof(fc_derived)};

/* Whether values have the names already, or those of torch_dist. */
static bool has_names(const fc_target *target) {
    for (size_t i = 0; i < target->ntensors; i++) {
        if (!target->tensors[i].source->object &&
            strncmp(target->tensors[i].name, "model.module.", strlen("model.module.")) == 0) {
            return true;
        }
    }
    return false;
}

static fc_code refuse_keys(const fc_target *target, fc_error *err) {
    return !fc_dist_has_keys(target)
               ? FC_OK
               : fc_advise(
                     err,
                     fc_fail(
                         err, FC_EUNSUPPORTED,
                         "%s: has the keys of torch_dist, with all layers in one tensor: convert it twice, by a recipe "
                         "to the names of the Hugging Face hub, and by its reverse to Megatron's",
                         target->source->path),
                     FC_HINT_RECIPE, NULL);
}

/* Refuses what GroupedMLP has: the experts of a layer in one matrix, which no module of Megatron-FSDP divides. */
static fc_code refuse_grouped(const fc_target *target, fc_error *err) {
    for (size_t i = 0; i < target->ntensors; i++) {
        const char *name = target->tensors[i].name;
        size_t digits, end;
        int64_t number;
        if (!target->tensors[i].source->object && fc_mg_expert_of(name, &digits, &end, &number) == MG_ALL_EXPERTS) {
            return fc_advise(err,
                             fc_fail(err, FC_EUNSUPPORTED,
                                     "%s: tensor %.256s has all experts of a layer, but fsdp_dtensor has a tensor for "
                                     "each: convert it twice, by a recipe to the names of the Hugging Face hub, and by "
                                     "its reverse to Megatron's",
                                     target->source->path, name),
                             FC_HINT_RECIPE, NULL);
        }
    }
    return FC_OK;
}

/* ---- the values of the result ---- */

/* The names of the model's parameters. @return NULL when out of memory */
static fc_name_table *find_parameters(const fc_target *target, bool nested, fc_arena *arena) {
    fc_name_table *table = fc_name_table_new(arena, target->ntensors + 1);
    for (size_t i = 0; table && i < target->ntensors; i++) {
        const fc_target_tensor *w = &target->tensors[i];
        const bool own = !nested || strncmp(w->source->name, "model.", strlen("model.")) == 0;
        if (own && !w->source->object && fc_optim_name_of(w).kind == FC_OPTIM_NONE) {
            fc_name_table_put(table, w->name, strlen(w->name), i);
        }
    }
    return table;
}

static fc_code keep_parameter(fc_dist_adapting *a, const fc_target_tensor *w, const fc_fsdp_dtensor_optimizer *o,
                              fc_arena *scratch) {
    const size_t master = fc_name_table_find(o->masters, w->name, strlen(w->name));
    const char *key = fc_arena_printf(scratch, "module.%s", w->name);
    const char *name = key ? fc_arena_printf(scratch, "model.%s", key) : NULL;
    FC_NEED(name, a->err, a->source->path);
    const fc_path_element elements[] = {{.key = "model"}, {.key = key}};
    const fc_path path = {elements, 2};
    return fc_dist_keep(a, master != FC_NO_NAME ? o->weights[master] : w->source, name, &path);
}

static fc_code add_missing(fc_dist_adapting *a, const char *name, const char *json) {
    const bool known = fc_name_table_find(a->names, name, strlen(name)) != FC_NO_NAME;
    return known ? FC_OK : fc_dist_add_text(a, name, NULL, json);
}

/* Whether the result leaves a value out: what Transformer Engine and torch_dist add. */
static bool is_dropped(const fc_target_tensor *w) {
    static const char content[] = "content_metadata";
    return w->source->object &&
           (fc_mg_is_extra_state(w->name) || strstr(w->name, "/shard_") ||
            strncmp(w->name, content, sizeof content - 1) == 0 || fc_ends_with(w->name, ".param_state_sharding_type"));
}

/* Adds the values of a source that has Megatron's own names. */
static fc_code add_renamed(fc_dist_adapting *a, const fc_target *changed, fc_name_table *parameters,
                           fc_arena *scratch) {
    fc_fsdp_dtensor_optimizer o = {.parameters = parameters, .step = -1};
    bool *taken = fc_arena_calloc(scratch, changed->ntensors + 1, sizeof *taken);
    FC_NEED(taken, a->err, a->source->path);
    FC_TRY(fc_fsdp_dtensor_add_optimizer(a, changed, &o, taken, scratch));
    for (size_t i = 0; i < changed->ntensors; i++) {
        const fc_target_tensor *w = &changed->tensors[i];
        if (taken[i] || is_dropped(w)) {
            continue;
        }
        FC_TRY(!w->source->object && fc_fsdp_dtensor_parameter(parameters, w->name) > 0
                   ? keep_parameter(a, w, &o, scratch)
                   : fc_dist_keep(a, w->source, w->name, &w->path));
    }
    const char *step = fc_arena_printf(a->out->arena, "%" PRId64, o.step > 0 ? o.step : 0);
    FC_NEED(step, a->err, a->source->path);
    FC_TRY(add_missing(a, "iteration", step));
    return add_missing(a, "checkpoint_version", "3.0");
}

static fc_code add_values(fc_dist_adapting *a, const fc_target *changed, fc_name_table *parameters, fc_arena *scratch) {
    FC_TRY(parameters ? add_renamed(a, changed, parameters, scratch) : FC_OK);
    for (size_t i = 0; !parameters && i < changed->ntensors; i++) {
        const fc_target_tensor *w = &changed->tensors[i];
        FC_TRY(fc_dist_keep(a, w->source, w->name, &w->path));
    }
    return fc_derived_set_tensors(a->out, a->values, a->count, a->err);
}

/* ---- the whole ---- */

/* Divides SwiGLU's matrices, and finds the parameters. */
static fc_code divide(fc_checkpoint **source, fc_target *target, fc_target *changed, fc_name_table **parameters,
                      fc_arena *arena, fc_error *err) {
    const fc_selection all = {0};
    const fc_checkpoint *before = *source;
    fc_selected counts;
    json_t *rules = NULL;
    FC_TRY(fc_dist_refuse_hub_names(target, err));
    FC_TRY(refuse_keys(target, err));
    FC_TRY(refuse_grouped(target, err));
    fc_dist_drop_lists(target);
    *parameters = find_parameters(target, fc_dist_has_model(*source), arena);
    FC_NEED(*parameters, err, before->path);
    FC_TRY(fc_fsdp_dtensor_find_halves(target, arena, &rules, err));
    FC_TRY(fc_dist_apply_rules(source, target, "fsdp_dtensor", rules, arena, err));
    *changed = *target;
    return *source == before ? FC_OK : fc_target_new(*source, &all, arena, changed, &counts, err);
}

static fc_code adapt(fc_checkpoint **source, const fc_selection *how, fc_arena *arena, size_t *left_out,
                     fc_error *err) {
    fc_selected counts;
    fc_target target, changed;
    fc_name_table *parameters = NULL; /* NULL: the names stay */
    FC_TRY(fc_target_new(*source, how, arena, &target, &counts, err));
    *left_out += counts.left_out;
    changed = target;
    FC_TRY(has_names(&target) ? FC_OK : divide(source, &target, &changed, &parameters, arena, err));
    fc_dist_adapting a = {.source = *source, .names = fc_name_table_new(arena, 2 * target.ntensors), .err = err};
    FC_NEED(a.names, err, (*source)->path);
    FC_TRY(fc_derived_new(&adapted_kind, source, 1, &a.out, err));
    a.out->mesh = a.source->mesh;
    const fc_code rc = add_values(&a, &changed, parameters, arena);
    free(a.values);
    return fc_derived_finish(a.out, rc, source);
}

bool fc_fsdp_dtensor_is_adapted(const fc_checkpoint *source) {
    return fc_derived_of(source, &adapted_kind) != NULL;
}

fc_code fc_fsdp_dtensor_adapt(const fc_checkpoint *source, const fc_selection *selection, size_t *left_out,
                              fc_checkpoint **out, fc_error *err) {
    return fc_dist_adapt_with(adapt, source, selection, left_out, out, err);
}
