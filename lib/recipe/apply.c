/*
 * Applies a recipe to a checkpoint: gives each value to the first rule that matches its name, groups the values of a
 * rule by its variables, runs each group, and lists what comes out.
 */
#include "base/grow.h"
#include "base/name_table.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "recipe/derived.h"
#include "recipe/group.h"

#include <stdlib.h>
#include <string.h>

typedef struct builder {
    const fc_recipe *recipe;
    fc_checkpoint *source, *out;
    fc_arena *scratch;
    bool *applies; /* per rule: its "when" holds */
    fc_group *groups;
    size_t ngroups, group_capacity;
    fc_name_table *names; /* of groups */
    fc_tensor *tensors;
    size_t count, capacity;
    uint64_t next; /* the offset of the next gathered block */
    fc_error *err;
} builder;

static fc_code no_memory(const builder *b) {
    return fc_no_memory(b->err, b->source->path);
}

/* A condition with an unknown name does not hold. */
static fc_code evaluate_conditions(builder *b) {
    b->applies = fc_arena_calloc(b->scratch, b->recipe->nrules + 1, sizeof *b->applies);
    if (!b->applies) {
        return fc_no_memory(b->err, b->recipe->label);
    }
    for (size_t i = 0; i < b->recipe->nrules; i++) {
        const char *when = b->recipe->rules[i].when, *unknown = NULL;
        int64_t value = 1;
        fc_code rc = when ? fc_recipe_evaluate(b->recipe, when, &value, &unknown, b->err) : FC_OK;
        if (rc != FC_OK && !unknown) {
            return rc;
        }
        b->applies[i] = rc == FC_OK && value != 0;
    }
    return FC_OK;
}

/* ---- finding the rule of a name ---- */

/* Finds the first rule that takes `name`. @return its number, or SIZE_MAX. */
static size_t find_rule(const builder *b, const char *name, size_t *pattern, fc_recipe_bindings *bindings) {
    for (size_t r = 0; r < b->recipe->nrules; r++) {
        const fc_recipe_rule *rule = &b->recipe->rules[r];
        for (size_t p = 0; b->applies[r] && p < rule->nfrom; p++) {
            if (fc_recipe_match(rule->from[p], name, bindings)) {
                *pattern = p;
                return r;
            }
        }
    }
    return SIZE_MAX;
}

fc_code fc_recipe_takes_all(const fc_recipe *recipe, const fc_target *target, bool *all, fc_error *err) {
    builder b = {.recipe = recipe, .scratch = fc_arena_new(), .err = err};
    fc_code rc = b.scratch ? evaluate_conditions(&b) : fc_no_memory(err, NULL);
    *all = rc == FC_OK;
    for (size_t i = 0; i < target->ntensors && *all; i++) {
        fc_recipe_bindings bindings;
        size_t pattern;
        *all = target->tensors[i].source->object || recipe->keeps_others ||
               find_rule(&b, target->tensors[i].name, &pattern, &bindings) != SIZE_MAX;
    }
    fc_arena_free(b.scratch);
    return rc;
}

/* @return how many characters two names have in common at their beginning and at their end. */
static size_t likeness(const char *a, const char *b) {
    size_t la = strlen(a), lb = strlen(b), front = 0, back = 0, most = la < lb ? la : lb;
    while (front < most && a[front] == b[front]) {
        front++;
    }
    while (back < most - front && a[la - 1 - back] == b[lb - 1 - back]) {
        back++;
    }
    return front + back;
}

static fc_code no_rule(const builder *b, const char *name) {
    const char *nearest = NULL;
    size_t best = 0;
    for (size_t r = 0; r < b->recipe->nrules; r++) {
        for (size_t p = 0; p < b->recipe->rules[r].nfrom; p++) {
            size_t like = likeness(name, b->recipe->rules[r].from[p]);
            if (!nearest || like > best) {
                best = like;
                nearest = b->recipe->rules[r].from[p];
            }
        }
    }
    fc_code rc = fc_fail(b->err, FC_EUSAGE, "%s: no rule of the recipe %s takes '%.256s'; the nearest is '%s'",
                         b->source->path, b->recipe->label, name, nearest ? nearest : "none");
    return fc_advise(b->err, rc, FC_HINT_EXCLUDE, name);
}

/* ---- groups ---- */

/* Removes the bindings of variables that `to` does not have, and sets the numbers that they stand for. */
static void unbind_inner(const fc_recipe_rule *rule, fc_recipe_bindings *bindings, uint64_t *numbers) {
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    const size_t count = fc_recipe_only(rule->from, rule->nfrom, rule->to, rule->nto, inner);
    for (size_t i = 0; i < count; i++) {
        const fc_recipe_binding *bound = fc_recipe_bound(bindings, inner[i].name, inner[i].len);
        if (bound) {
            numbers[i] = fc_recipe_number_of(bound);
            bindings->all[bound - bindings->all] = bindings->all[--bindings->count];
        }
    }
}

/* Finds or adds the group of a rule with these bindings. */
static fc_code find_group(builder *b, size_t rule, const fc_recipe_bindings *bindings, fc_group **out) {
    const fc_recipe_rule *r = &b->recipe->rules[rule];
    const char *spelled = fc_recipe_spell(r->from[0], bindings, b->scratch);
    const char *key = spelled ? fc_arena_printf(b->scratch, "%zu %s", rule, spelled) : NULL;
    if (!key || !fc_grow(&b->groups, &b->group_capacity, b->ngroups + 1, sizeof *b->groups)) {
        return no_memory(b);
    }
    size_t at = fc_name_table_put(b->names, key, strlen(key), b->ngroups);
    if (at == b->ngroups) {
        b->groups[b->ngroups++] = (fc_group){.rule = r, .bindings = *bindings};
    }
    *out = &b->groups[at];
    return FC_OK;
}

static fc_code add_input(builder *b, size_t rule, size_t pattern, fc_recipe_bindings *bindings,
                         const fc_tensor *tensor) {
    fc_group_input input = {.tensor = tensor, .pattern = pattern};
    fc_group *g = NULL;
    unbind_inner(&b->recipe->rules[rule], bindings, input.numbers);
    FC_TRY(find_group(b, rule, bindings, &g));
    if (!fc_grow(&g->inputs, &g->capacity, g->ninputs + 1, sizeof *g->inputs)) {
        return no_memory(b);
    }
    g->inputs[g->ninputs++] = input;
    return FC_OK;
}

/* ---- results ---- */

static fc_code add_tensor(builder *b, const fc_tensor *t) {
    if (!fc_grow(&b->tensors, &b->capacity, b->count + 1, sizeof *b->tensors)) {
        return no_memory(b);
    }
    b->tensors[b->count++] = *t;
    return FC_OK;
}

/* Sets a name without nesting. */
static fc_code set_name(const builder *b, const char *name, fc_tensor *t) {
    fc_path_element *element = fc_arena_calloc(b->out->arena, 1, sizeof *element);
    t->name = fc_arena_strndup(b->out->arena, name, strlen(name));
    if (!element || !t->name) {
        return no_memory(b);
    }
    element->key = t->name;
    t->path = (fc_path){element, 1};
    return FC_OK;
}

/* Copies the name and path that the target gives to a value. */
static fc_code copy_name(const builder *b, const fc_target_tensor *w, fc_tensor *t) {
    fc_arena *arena = b->out->arena;
    fc_path_element *path = fc_arena_calloc(arena, w->path.count + 1, sizeof *path);
    t->name = fc_arena_strndup(arena, w->name, strlen(w->name));
    if (!path || !t->name) {
        return no_memory(b);
    }
    for (size_t i = 0; i < w->path.count; i++) {
        path[i] = w->path.elements[i];
        path[i].key = fc_arena_strndup(arena, path[i].key, strlen(path[i].key));
        if (!path[i].key) {
            return no_memory(b);
        }
    }
    t->path = (fc_path){path, w->path.count};
    return FC_OK;
}

/* A copy of a value of the source, which keeps its chunks. */
static fc_code same_tensor(const builder *b, const fc_tensor *source, fc_tensor *t) {
    fc_recipe_origin *origin = fc_arena_calloc(b->out->arena, 1, sizeof *origin);
    if (!origin) {
        return no_memory(b);
    }
    origin->tensor = source;
    *t = *source;
    t->detail = origin;
    t->placements = NULL; /* they refer to a mesh that other tensors do not have */
    return FC_OK;
}

static fc_code made_tensor(builder *b, const fc_parted *parted, fc_tensor *t) {
    fc_recipe_origin *origin = fc_arena_calloc(b->out->arena, 1, sizeof *origin);
    int64_t *shape = fc_arena_calloc(b->out->arena, (size_t)parted->ndim + 1, sizeof *shape);
    if (!origin || !shape) {
        return no_memory(b);
    }
    memcpy(shape, parted->shape, (size_t)parted->ndim * sizeof *shape);
    *t = (fc_tensor){.dtype = parted->dtype, .ndim = parted->ndim, .shape = shape, .detail = origin};
    if (fc_gather_pays(parted) && !b->source->format->layout_only) {
        return fc_gather_new(parted, b->out->arena, &b->next, t, &origin->gathered, b->err);
    }
    return fc_recipe_chunks(b->source, parted, b->out->arena, t, &origin->places, b->err);
}

static fc_code add_output(builder *b, const fc_group *g, const fc_group_output *o) {
    fc_recipe_bindings bindings = g->bindings;
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    const size_t count = fc_recipe_only(g->rule->to, g->rule->nto, g->rule->from, g->rule->nfrom, inner);
    for (size_t i = 0; i < count && bindings.count < FC_RECIPE_VARIABLES; i++) {
        const char *digits = fc_arena_printf(b->scratch, "%llu", (unsigned long long)o->numbers[i]);
        if (!digits) {
            return no_memory(b);
        }
        bindings.all[bindings.count++] = (fc_recipe_binding){inner[i].name, digits, inner[i].len, strlen(digits), 0};
    }
    const char *name = fc_recipe_spell(g->rule->to[o->pattern], &bindings, b->scratch);
    fc_tensor t;
    if (!name) {
        return no_memory(b);
    }
    if (fc_parted_is_same(&o->tensor)) {
        FC_TRY(same_tensor(b, o->tensor.parts->source, &t));
    } else {
        FC_TRY_CONTEXT(made_tensor(b, &o->tensor, &t), b->err, "%s", name);
    }
    FC_TRY(set_name(b, name, &t));
    return add_tensor(b, &t);
}

/* A rule without operations only renames, whatever the dimensions. */
static fc_code run_group(builder *b, fc_group *g) {
    fc_group_output *outputs = NULL;
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    size_t count = 0;
    const bool renames = g->rule->nops == 0 && g->rule->nfrom == 1 && g->rule->nto == 1 && g->ninputs == 1;
    if (renames && fc_recipe_only(g->rule->to, 1, g->rule->from, 1, inner) == 0) {
        const char *name = fc_recipe_spell(g->rule->to[0], &g->bindings, b->scratch);
        fc_tensor t;
        FC_TRY(name ? same_tensor(b, g->inputs[0].tensor, &t) : no_memory(b));
        FC_TRY(set_name(b, name, &t));
        return add_tensor(b, &t);
    }
    FC_TRY(fc_group_run(b->recipe, g, &outputs, &count, b->err));
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < count; i++) {
        rc = add_output(b, g, &outputs[i]);
    }
    fc_group_free_outputs(outputs, count);
    return rc;
}

/* "add": a tensor of the result under a second name. */
static fc_code add_copies(builder *b) {
    const size_t made = b->count;
    for (size_t r = 0; r < b->recipe->nrules; r++) {
        const fc_recipe_rule *rule = &b->recipe->rules[r];
        for (size_t i = 0; b->applies[r] && rule->kind == FC_RULE_ADD && i < made; i++) {
            fc_recipe_bindings bindings;
            if (!fc_recipe_match(rule->to[0], b->tensors[i].name, &bindings)) {
                continue;
            }
            fc_tensor t = b->tensors[i];
            const char *name = fc_recipe_spell(rule->to[1], &bindings, b->scratch);
            FC_TRY(name ? set_name(b, name, &t) : no_memory(b));
            FC_TRY(add_tensor(b, &t));
        }
    }
    return FC_OK;
}

/* ---- all of it ---- */

/* Gives a value to its rule. An object that no rule takes is added unchanged, and so is a tensor if the recipe keeps
   others. */
static fc_code give(builder *b, const fc_target_tensor *w) {
    fc_recipe_bindings bindings;
    size_t pattern = 0;
    const size_t rule = find_rule(b, w->name, &pattern, &bindings);
    if (rule != SIZE_MAX && b->recipe->rules[rule].kind == FC_RULE_DROP) {
        return FC_OK;
    }
    if (rule != SIZE_MAX && !w->source->object) {
        return add_input(b, rule, pattern, &bindings, w->source);
    }
    if (!w->source->object && !b->recipe->keeps_others) {
        return no_rule(b, w->name);
    }
    fc_tensor t;
    FC_TRY(same_tensor(b, w->source, &t));
    FC_TRY(copy_name(b, w, &t));
    return add_tensor(b, &t);
}

static fc_code check_names(const builder *b) {
    const char *name = NULL;
    FC_TRY(fc_find_same_name(b->tensors, b->count, &name, b->err));
    return name ? fc_fail(b->err, FC_EUSAGE, "%s: the recipe %s makes '%.256s' twice", b->source->path,
                          b->recipe->label, name)
                : FC_OK;
}

static fc_code build(builder *b, const fc_target *target) {
    b->names = fc_name_table_new(b->scratch, target->ntensors + 1);
    if (!b->names) {
        return no_memory(b);
    }
    FC_TRY(evaluate_conditions(b));
    for (size_t i = 0; i < target->ntensors; i++) {
        FC_TRY(give(b, &target->tensors[i]));
    }
    for (size_t i = 0; i < b->ngroups; i++) {
        FC_TRY(run_group(b, &b->groups[i]));
    }
    FC_TRY(add_copies(b));
    FC_TRY(check_names(b));
    fc_tensor *kept = fc_arena_calloc(b->out->arena, b->count + 1, sizeof *kept);
    if (!kept) {
        return no_memory(b);
    }
    if (b->count > 0) {
        memcpy(kept, b->tensors, b->count * sizeof *kept);
    }
    b->out->tensors = kept;
    b->out->ntensors = b->count;
    return FC_OK;
}

fc_code fc_recipe_apply(fc_checkpoint *source, const fc_target *target, const fc_recipe *recipe, fc_checkpoint **out,
                        fc_error *err) {
    builder b = {.recipe = recipe, .source = source, .scratch = fc_arena_new(), .err = err};
    *out = NULL;
    b.out = fc_recipe_derived_new(source);
    fc_code rc = b.scratch && b.out ? build(&b, target) : fc_no_memory(err, source->path);
    for (size_t i = 0; i < b.ngroups; i++) {
        free(b.groups[i].inputs);
    }
    free(b.groups);
    free(b.tensors);
    fc_arena_free(b.scratch);
    if (rc != FC_OK) {
        fc_checkpoint_close(b.out);
        return rc;
    }
    rc = fc_recipe_derived_own(b.out, source, err);
    if (rc != FC_OK) {
        fc_checkpoint_close(b.out);
        return rc;
    }
    *out = b.out;
    return FC_OK;
}
