/*
 * Gives the values of any source the names and shapes that megatron-core looks for in a torch_dist checkpoint. It names
 * parameters after their modules, but stores those of all layers as one tensor, unless the layers differ, and those of
 * all experts of a layer. That is a recipe, made for the model at hand. Then the values are added that its loader
 * needs: an `_extra_state` for each module that Transformer Engine may implement, and what describes the content.
 */
#include "torch_dist/torch_dist.h"

#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/path.h"
#include "derived/derived.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"
#include "torch_dist/adapting.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char shard[] = "/shard_"; /* in the keys of megatron-core's sharded objects */
static const char content[] = "content_metadata", no_state[] = "[null]";

enum { MOST_GROUPED = 4096 }; /* experts in one tensor, each of which gets an object */

bool fc_dist_is_state(const char *name) {
    return strncmp(name, "optimizer.", strlen("optimizer.")) == 0 || strncmp(name, "optim.", strlen("optim.")) == 0;
}

bool fc_dist_is_common(const fc_target_tensor *t) {
    return t->source->object && !strstr(t->name, shard);
}

/* ---- the recipe ---- */

static bool append_operation(json_t *operations, const char *name, json_t *value) {
    json_t *operation = json_object();
    return json_object_set_new(operation, name, value) == 0 && json_array_append_new(operations, operation) == 0;
}

/* The rule of a kind; json_null if its name and shape stay. @return NULL when out of memory. */
static json_t *make_rule(const fc_dist_layers *l, const fc_dist_kind *k) {
    const bool alike = l->stacks[k->stack].alike;
    const fc_dist_parameter *p = &k->like;
    json_t *to = json_sprintf("%.*s%s%s", (int)p->prefix, p->from, alike ? "" : "{n}.", p->module);
    json_t *operations = json_array(), *rule = json_object();
    bool ok = to && operations && rule;
    if (ok && p->transposed) {
        ok = append_operation(operations, "transpose", json_pack("[ii]", 1, 2));
    }
    for (int i = 0; i < alike + (p->expert >= 0); i++) {
        ok = ok && append_operation(operations, "stack", json_integer(0));
    }
    const bool same = ok && json_array_size(operations) == 0 && strcmp(json_string_value(to), p->from) == 0;
    ok = ok && json_object_set_new(rule, "from", json_string(p->from)) == 0 && json_object_set(rule, "to", to) == 0 &&
         (json_array_size(operations) == 0 || json_object_set(rule, "operations", operations) == 0);
    json_decref(to);
    json_decref(operations);
    if (!ok || same) {
        json_decref(rule);
        return ok ? json_null() : NULL;
    }
    return rule;
}

/* Makes the rules, a JSON array. @return NULL when out of memory. */
static json_t *make_rules(const fc_dist_layers *l) {
    json_t *rules = json_array();
    bool ok = rules;
    for (size_t i = 0; ok && i < l->nkinds; i++) {
        json_t *rule = make_rule(l, &l->kinds[i]);
        ok = rule && (json_is_null(rule) || json_array_append_new(rules, rule) == 0);
    }
    if (!ok) {
        json_decref(rules);
        return NULL;
    }
    return rules;
}

fc_code fc_dist_apply_rules(fc_checkpoint **source, const fc_target *target, const char *name, json_t *rules,
                            fc_arena *arena, fc_error *err) {
    if (rules && json_array_size(rules) == 0) {
        json_decref(rules);
        return FC_OK;
    }
    json_t *recipe = rules ? json_pack("{sssissssso}", "fsdpckpt", "recipe", "schema", 1, "description",
                                       "the keys of megatron-core", "others", "keep", "rules", rules)
                           : NULL;
    char *text = recipe ? json_dumps(recipe, JSON_COMPACT) : NULL;
    const fc_recipe *parsed = NULL;
    fc_checkpoint *made = NULL;
    json_decref(recipe);
    FC_NEED(text, err, NULL);
    fc_code rc = fc_recipe_parse(name, text, strlen(text), NULL, arena, &parsed, err);
    rc = rc == FC_OK ? fc_recipe_apply(*source, target, parsed, &made, err) : rc;
    free(text);
    if (rc == FC_OK) {
        *source = made;
    }
    return rc;
}

/* ---- the values of the result ---- */

static fc_code add_value(fc_dist_adapting *a, const fc_tensor *t) {
    FC_NEED(fc_grow(&a->values, &a->capacity, a->count + 1, sizeof *a->values), a->err, a->source->path);
    FC_NEED(fc_name_table_put(a->names, t->name, strlen(t->name), a->count) != FC_NO_NAME, a->err, a->source->path);
    a->values[a->count++] = *t;
    return FC_OK;
}

fc_code fc_dist_keep(fc_dist_adapting *a, const fc_tensor *value, const char *name, const fc_path *path) {
    fc_arena *arena = a->out->arena;
    fc_tensor t = *value;
    fc_origin *origin = fc_arena_calloc(arena, 1, sizeof *origin);
    t.name = fc_arena_strndup(arena, name, strlen(name));
    const fc_path_element flat = {.key = t.name};
    const fc_path alone = {&flat, 1};
    FC_NEED(origin && t.name && fc_path_copy(arena, path ? path : &alone, &t.path), a->err, a->source->path);
    *origin = (fc_origin){.kind = FC_ORIGIN_KEPT, .tensor = value};
    t.detail = origin;
    return add_value(a, &t);
}

static fc_code keep_value(fc_dist_adapting *a, const fc_target_tensor *w) {
    return fc_dist_keep(a, w->source, w->name, fc_dist_is_common(w) ? &w->path : NULL);
}

fc_code fc_dist_add_text(fc_dist_adapting *a, const char *name, const fc_path *path, const char *json) {
    static const fc_object object = {.encoding = FC_OBJECT_VALUE};
    fc_arena *arena = a->out->arena;
    fc_tensor t = {.name = name, .dtype = FC_OPAQUE, .ndim = 1, .object = &object};
    const fc_path_element flat = {.key = name};
    const fc_path_element *own = path ? path->elements : fc_arena_copy(arena, &flat, 1, sizeof flat);
    FC_NEED(own && name && (!path || fc_path_copy(arena, path, &t.path)), a->err, a->source->path);
    t.path = path ? t.path : (fc_path){own, 1};
    const fc_origin *last = a->last ? a->last->detail : NULL;
    if (last && last->text == json) { /* objects that differ in their names only */
        t.shape = a->last->shape;
        t.chunks = a->last->chunks;
        t.nchunks = a->last->nchunks;
        t.detail = last;
        return add_value(a, &t);
    }
    struct made {
        fc_tensor tensor;
        fc_origin origin;
        fc_chunk chunk;
        int64_t dims[2], shape;
    } *m = fc_arena_calloc(arena, 1, sizeof *m);
    FC_NEED(m, a->err, a->source->path);
    m->origin = (fc_origin){.kind = FC_ORIGIN_TEXT, .text = json};
    m->shape = m->dims[1] = (int64_t)strlen(json);
    m->chunk = (fc_chunk){.dims = m->dims, .rank = FC_NO_RANK};
    t.shape = &m->shape;
    t.chunks = &m->chunk;
    t.nchunks = a->source->format->layout_only ? 0 : 1;
    t.detail = &m->origin;
    m->tensor = t;
    a->last = &m->tensor;
    return add_value(a, &t);
}

/* Adds the `_extra_state` of a module. The key has the number of the layer, or counts it among those of the tensor. */
static fc_code add_extra_state(fc_dist_adapting *a, const fc_dist_stack *s, int64_t layer, const char *module,
                               int64_t expert, int64_t experts) {
    fc_arena *arena = a->out->arena;
    char number[24] = "", at[64] = "0", of[64] = "1";
    if (!s->alike) {
        snprintf(number, sizeof number, "%" PRId64 ".", layer);
    }
    if (expert >= 0 && s->alike) {
        snprintf(at, sizeof at, "%" PRId64 ".%" PRId64, layer, expert);
        snprintf(of, sizeof of, "%" PRId64 ".%" PRId64, s->layers, experts);
    } else if (expert >= 0 || s->alike) {
        snprintf(at, sizeof at, "%" PRId64, s->alike ? layer : expert);
        snprintf(of, sizeof of, "%" PRId64, s->alike ? s->layers : experts);
    }
    const char *name = fc_arena_printf(arena, "%.*s%s%s._extra_state%s%s_%s", (int)s->length, s->prefix, number, module,
                                       shard, at, of);
    FC_NEED(name, a->err, a->source->path);
    const bool known = fc_name_table_find(a->names, name, strlen(name)) != FC_NO_NAME; /* another recipe has kept it */
    return known ? FC_OK : fc_dist_add_text(a, name, NULL, no_state); /* megatron-core stores a list of the object */
}

/* The module of a weight that is a linear layer, or NULL. */
static const char *linear_module(fc_arena *arena, const char *module) {
    static const char weight[] = ".weight";
    const size_t n = strlen(module), w = sizeof weight - 1;
    if (n < w || strcmp(module + n - w, weight) != 0) {
        return "";
    }
    const char *name = fc_arena_strndup(arena, module, n - w);
    const char *dot = name ? strrchr(name, '.') : NULL, *last = dot ? dot + 1 : name;
    const bool linear = name && (strncmp(last, "linear_", strlen("linear_")) == 0 || strcmp(last, "eh_proj") == 0);
    return linear || !name ? name : "";
}

/* Adds what Transformer Engine's modules of a parameter look for. */
static fc_code add_states_of(fc_dist_adapting *a, const fc_dist_layers *l, size_t value, const fc_tensor *tensor) {
    static const char projection[] = "self_attention.linear_proj";
    const fc_dist_kind *k = &l->kinds[l->kind_of[value]];
    const fc_dist_parameter *p = &l->parameters[value];
    const fc_dist_stack *s = &l->stacks[k->stack];
    const char *module = linear_module(a->out->arena, p->module);
    FC_NEED(module, a->err, a->source->path);
    if (!*module) {
        return FC_OK;
    }
    const int64_t experts = p->grouped && tensor->ndim > 0 ? tensor->shape[0] : 0;
    if (experts > MOST_GROUPED) {
        return fc_fail(a->err, FC_EUNSUPPORTED, "%s: tensor %.256s: more than %d experts in one matrix",
                       a->source->path, tensor->name, MOST_GROUPED);
    }
    for (int64_t e = 0; e < experts; e++) {
        FC_TRY(add_extra_state(a, s, p->layer, module, e, experts));
    }
    FC_TRY(p->grouped ? FC_OK : add_extra_state(a, s, p->layer, module, p->expert, k->experts));
    const size_t n = strlen(module), q = sizeof projection - 1;
    if (n < q || strcmp(module + n - q, projection) != 0) {
        return FC_OK;
    }
    module = fc_arena_printf(a->out->arena, "%.*sself_attention.core_attention", (int)(n - q), module);
    return module ? add_extra_state(a, s, p->layer, module, -1, 0) : fc_no_memory(a->err, a->source->path);
}

/* Whether the result has a value of this name, or with names below it. */
static bool has_value(const fc_dist_adapting *a, const char *name) {
    const size_t n = strlen(name);
    for (size_t i = 0; i < a->count; i++) {
        const char *own = a->values[i].name;
        if (strncmp(own, name, n) == 0 && (own[n] == '\0' || own[n] == '.')) {
            return true;
        }
    }
    return false;
}

/* Adds what describes the content. */
static fc_code add_description(fc_dist_adapting *a, bool alike, int64_t step) {
    char iteration[24];
    snprintf(iteration, sizeof iteration, "%" PRId64, step > 0 ? step : 0);
    const struct {
        const char *name, *json;
    } all[] = {{"checkpoint_version", "3.0"},
               {"iteration", fc_arena_strndup(a->out->arena, iteration, strlen(iteration))},
               {content, alike ? "{\"singleton_local_shards\": false, \"chained_optim_avoid_prefix\": true, "
                                 "\"distrib_optim_sharding_type\": \"fully_reshardable\"}"
                               : "{\"non_homogeneous_layers\": true, \"singleton_local_shards\": false, "
                                 "\"chained_optim_avoid_prefix\": true, "
                                 "\"distrib_optim_sharding_type\": \"fully_reshardable\"}"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        FC_NEED(all[i].json, a->err, a->source->path);
        FC_TRY(has_value(a, all[i].name) ? FC_OK : fc_dist_add_text(a, all[i].name, NULL, all[i].json));
    }
    return FC_OK;
}

/* Whether the value says how another checkpoint has stored the layers. */
static bool is_content(const fc_target_tensor *w) {
    const size_t n = sizeof content - 1;
    return strncmp(w->name, content, n) == 0 && (w->name[n] == '\0' || w->name[n] == '.');
}

/* @param l without kinds: the names were megatron-core's already, and the source describes them. */
static fc_code add_values(fc_dist_adapting *a, const fc_target *target, const fc_dist_layers *l,
                          const fc_target *changed, fc_arena *scratch) {
    bool alike = true, *taken = fc_arena_calloc(scratch, changed->ntensors + 1, sizeof *taken);
    int64_t step = -1;
    FC_NEED(taken, a->err, a->source->path);
    FC_TRY(fc_dist_add_optimizer(a, changed, taken, &step));
    for (size_t i = 0; i < changed->ntensors; i++) {
        const fc_target_tensor *w = &changed->tensors[i];
        FC_TRY(taken[i] || (l->kinds && is_content(w)) ? FC_OK : keep_value(a, w));
    }
    for (size_t i = 0; l->kinds && i < target->ntensors; i++) {
        FC_TRY(l->kind_of[i] == SIZE_MAX ? FC_OK : add_states_of(a, l, i, target->tensors[i].source));
    }
    for (size_t i = 0; i < l->nstacks; i++) {
        const bool predicts = strncmp(l->stacks[i].prefix, "mtp.", 4) == 0;
        alike = alike && (l->stacks[i].alike || predicts);
    }
    FC_TRY(l->kinds ? add_description(a, alike, step) : FC_OK);
    return fc_derived_set_tensors(a->out, a->values, a->count, a->err);
}

/* ---- the whole ---- */

static const fc_derived_kind adapted_kind = {.size = sizeof(fc_derived)};

bool fc_dist_has_keys(const fc_target *target) {
    for (size_t i = 0; i < target->ntensors; i++) {
        const char *name = target->tensors[i].name, *layers = strstr(name, ".layers.");
        const char first = layers ? layers[strlen(".layers.")] : '0';
        if (!target->tensors[i].source->object &&
            (strstr(name, ".experts.experts.") || first < '0' || first > '9' ||
             strncmp(name, "optimizer.distributed.", strlen("optimizer.distributed.")) == 0)) {
            return true;
        }
    }
    return false;
}

fc_code fc_dist_refuse_hub_names(const fc_target *target, fc_error *err) {
    for (size_t i = 0; i < target->ntensors; i++) {
        const char *name = target->tensors[i].name;
        if (strncmp(name, "model.layers.", strlen("model.layers.")) == 0) {
            return fc_advise(
                err,
                fc_fail(err, FC_EUSAGE,
                        "%s: tensor %s has a name of the Hugging Face hub, which Megatron does not load: a "
                        "recipe makes its own",
                        target->source->path, name),
                FC_HINT_RECIPE, NULL);
        }
    }
    return FC_OK;
}

/* Refuses SwiGLU's halves as Megatron-FSDP stores them: megatron-core looks for one tensor. */
static fc_code refuse_halves(const fc_target *target, fc_error *err) {
    for (size_t i = 0; i < target->ntensors; i++) {
        const char *name = target->tensors[i].name, *at = strstr(name, ".linear_fc1.");
        if (at && !target->tensors[i].source->object && (fc_ends_with(at, "_w") || fc_ends_with(at, "_v"))) {
            return fc_advise(err,
                             fc_fail(err, FC_EUNSUPPORTED,
                                     "%s: tensor %.256s is half of what torch_dist has as one tensor: a recipe to the "
                                     "names of the Hugging Face hub joins the halves, and its reverse gives Megatron's",
                                     target->source->path, name),
                             FC_HINT_RECIPE, NULL);
        }
    }
    return FC_OK;
}

bool fc_dist_has_model(const fc_checkpoint *source) {
    for (size_t i = 0; i < source->ntensors; i++) {
        const char *name = source->tensors[i].name;
        if (strncmp(name, "model.decoder.", strlen("model.decoder.")) == 0 ||
            strncmp(name, "model.embedding.", strlen("model.embedding.")) == 0) {
            return true;
        }
    }
    return false;
}

static fc_code adapt(fc_checkpoint **source, const fc_selection *how, fc_arena *arena, size_t *left_out,
                     fc_error *err) {
    fc_selected counts;
    fc_target target, changed;
    fc_dist_layers layers = {0};
    FC_TRY(fc_target_new(*source, how, arena, &target, &counts, err));
    *left_out += counts.left_out;
    fc_dist_drop_lists(&target);
    changed = target;
    if (!fc_dist_has_keys(&target)) {
        const fc_selection all = {0};
        const fc_checkpoint *before = *source;
        FC_TRY(fc_dist_refuse_hub_names(&target, err));
        FC_TRY(refuse_halves(&target, err));
        FC_TRY(fc_dist_find_layers(&target, arena, &layers, err));
        FC_TRY(fc_dist_apply_rules(source, &target, "torch_dist", make_rules(&layers), arena, err));
        FC_TRY(*source == before ? FC_OK : fc_target_new(*source, &all, arena, &changed, &counts, err));
    }
    fc_dist_adapting a = {.source = *source, .names = fc_name_table_new(arena, 2 * target.ntensors), .err = err};
    FC_NEED(a.names, err, (*source)->path);
    FC_TRY(fc_derived_new(&adapted_kind, source, 1, &a.out, err));
    a.out->mesh = a.source->mesh;
    const fc_code rc = add_values(&a, &target, &layers, &changed, arena);
    free(a.values);
    return fc_derived_finish(a.out, rc, source);
}

bool fc_dist_is_adapted(const fc_checkpoint *source) {
    return fc_derived_of(source, &adapted_kind) != NULL;
}

fc_code fc_dist_adapt_with(fc_dist_adapter *adapt_values, const fc_checkpoint *source, const fc_selection *selection,
                           size_t *left_out, fc_checkpoint **out, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *made = (fc_checkpoint *)(uintptr_t)source; /* never changed or closed */
    *out = NULL;
    const fc_selection how = {
        .include = selection->include,
        .exclude = selection->exclude,
        .strip_prefix = selection->strip_prefix || !fc_dist_has_model(source) ? selection->strip_prefix : "model.",
        .rename = selection->rename};
    const fc_code rc = arena ? adapt_values(&made, &how, arena, left_out, err) : fc_no_memory(err, source->path);
    fc_arena_free(arena);
    if (made != source) {
        fc_derived_lend(made, source);
    }
    if (rc == FC_OK) {
        *out = made;
    } else if (made != source) {
        fc_checkpoint_close(made);
    }
    return rc;
}

fc_code fc_dist_adapt(const fc_checkpoint *source, const fc_selection *selection, size_t *left_out, fc_checkpoint **out,
                      fc_error *err) {
    return fc_dist_adapt_with(adapt, source, selection, left_out, out, err);
}
