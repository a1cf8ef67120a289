/*
 * Applies a recipe to a checkpoint: gives each value to the first rule that matches its name, groups the values of a
 * rule by its variables, runs each group, and lists what comes out.
 */
#include "base/grow.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/try.h"
#include "recipe/builder.h"
#include "recipe/recipe.h"

#include <stdlib.h>
#include <string.h>

fc_code fc_recipe_conditions(const fc_recipe *recipe, fc_arena *arena, bool **out, fc_error *err) {
    bool *applies = fc_arena_calloc(arena, recipe->nrules + 1, sizeof *applies);
    FC_NEED(applies, err, recipe->label);
    for (size_t i = 0; i < recipe->nrules; i++) {
        const char *when = recipe->rules[i].when;
        int64_t value = 1;
        bool known = true;
        FC_TRY(when ? fc_recipe_evaluate_known(recipe, when, &value, &known, err) : FC_OK);
        applies[i] = known && value != 0;
    }
    *out = applies;
    return FC_OK;
}

/* ---- finding the rule of a name ---- */

size_t fc_recipe_find_rule(const fc_recipe_builder *b, const char *name, size_t *pattern,
                           fc_recipe_bindings *bindings) {
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

/* Whether a rule takes a value, or the parameter that it is state of. */
static fc_code is_taken(const fc_recipe_builder *b, const fc_target_tensor *w, bool *taken) {
    fc_recipe_bindings bindings;
    size_t pattern;
    const fc_optim_name n = fc_optim_name_of(w);
    *taken = w->source->object || b->recipe->keeps_others || n.is_number ||
             fc_recipe_find_rule(b, w->name, &pattern, &bindings) != SIZE_MAX;
    if (!*taken && n.kind != FC_OPTIM_NONE) {
        const char *parameter = fc_arena_strndup(b->scratch, n.text, n.len);
        FC_NEED(parameter, b->err, NULL);
        *taken = fc_recipe_find_rule(b, parameter, &pattern, &bindings) != SIZE_MAX;
    }
    return FC_OK;
}

fc_code fc_recipe_takes_all(const fc_recipe *recipe, const fc_target *target, const fc_target_tensor **untaken,
                            fc_error *err) {
    fc_recipe_builder b = {.recipe = recipe, .scratch = fc_arena_new(), .err = err};
    fc_code rc = b.scratch ? fc_recipe_conditions(recipe, b.scratch, &b.applies, err) : fc_no_memory(err, NULL);
    *untaken = NULL;
    for (size_t i = 0; i < target->ntensors && rc == FC_OK && !*untaken; i++) {
        bool taken = false;
        rc = is_taken(&b, &target->tensors[i], &taken);
        *untaken = taken ? NULL : &target->tensors[i];
    }
    fc_arena_free(b.scratch);
    return rc;
}

/* The next character of a name or pattern, with one for a number and for a variable. */
static char next_of(const char **at) {
    const char c = **at;
    if (c == '{') {
        *at += strcspn(*at, "}");
        *at += **at == '}';
    } else {
        *at += c >= '0' && c <= '9' ? strspn(*at, "0123456789") : 1;
    }
    return c == '{' || (c >= '0' && c <= '9') ? '#' : c;
}

/* Copies a name or pattern, so that all numbers and variables are alike. */
static size_t flatten(const char *text, char *out, size_t size) {
    size_t len = 0;
    while (*text && len < size) {
        out[len++] = next_of(&text);
    }
    return len;
}

/* @return how alike a name and a pattern are: characters in common at both ends, less half of those of the pattern. */
static long likeness(const char *name, const char *pattern) {
    char a[512], b[512];
    const size_t la = flatten(name, a, sizeof a), lb = flatten(pattern, b, sizeof b), most = la < lb ? la : lb;
    size_t front = 0, back = 0;
    while (front < most && a[front] == b[front]) {
        front++;
    }
    while (back < most - front && a[la - 1 - back] == b[lb - 1 - back]) {
        back++;
    }
    return 2 * (long)(front + back) - (long)lb;
}

fc_code fc_recipe_no_rule(const fc_recipe_builder *b, const char *name) {
    const char *nearest = NULL, *when = NULL;
    long best = 0;
    for (size_t r = 0; r < b->recipe->nrules; r++) {
        for (size_t p = 0; p < b->recipe->rules[r].nfrom; p++) {
            const long like = likeness(name, b->recipe->rules[r].from[p]);
            if (!nearest || like > best) {
                best = like;
                nearest = b->recipe->rules[r].from[p];
                when = b->applies[r] ? NULL : b->recipe->rules[r].when;
            }
        }
    }
    fc_code rc = fc_fail(b->err, FC_EUSAGE, "%s: no rule of the recipe %s takes '%.256s'; the nearest is '%s'%s%s%s",
                         b->source->path, b->recipe->label, name, nearest ? nearest : "none",
                         when ? ", which is only for models with '" : "", when ? when : "", when ? "'" : "");
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

fc_code fc_recipe_find_group(fc_recipe_builder *b, size_t rule, fc_recipe_bindings *bindings, uint64_t *numbers,
                             size_t *group) {
    const fc_recipe_rule *r = &b->recipe->rules[rule];
    unbind_inner(r, bindings, numbers);
    const char *spelled = fc_recipe_spell(r->from[0], bindings, b->scratch);
    FC_NEED(spelled && fc_grow(&b->groups, &b->group_capacity, b->ngroups + 1, sizeof *b->groups), b->err,
            b->source->path);
    *group = fc_name_table_put_child(b->group_names, rule, spelled, strlen(spelled), b->ngroups);
    FC_NEED(*group != FC_NO_NAME, b->err, b->source->path);
    if (*group == b->ngroups) {
        b->groups[b->ngroups++] = (fc_recipe_group){.group = {.rule = r, .bindings = *bindings}};
    }
    return FC_OK;
}

static fc_code add_input(fc_recipe_builder *b, size_t rule, size_t pattern, fc_recipe_bindings *bindings,
                         const fc_tensor *tensor) {
    fc_group_input input = {.tensor = tensor, .pattern = pattern};
    size_t at = 0;
    FC_TRY(fc_recipe_find_group(b, rule, bindings, input.numbers, &at));
    fc_group *g = &b->groups[at].group;
    FC_NEED(fc_arena_grow(b->scratch, &g->inputs, &g->capacity, g->ninputs, g->ninputs + 1, sizeof *g->inputs), b->err,
            b->source->path);
    g->inputs[g->ninputs++] = input;
    return FC_OK;
}

/* ---- results ---- */

static fc_code add_output(fc_recipe_builder *b, fc_recipe_group *g, const fc_group_output *o) {
    const char *name = fc_recipe_output_name(b, &g->group, o);
    fc_tensor t;
    FC_NEED(name, b->err, b->source->path);
    if (fc_parted_is_same(&o->tensor)) {
        FC_TRY(fc_recipe_same_tensor(b, o->tensor.parts->source, &t));
    } else {
        FC_TRY_CONTEXT(fc_recipe_made_tensor(b, &o->tensor, &t), b->err, "%s", name);
    }
    g->names[g->nnames++] = name;
    FC_TRY(fc_recipe_set_name(b, name, &t));
    return fc_recipe_add(b, &t);
}

static fc_code make_names(const fc_recipe_builder *b, fc_recipe_group *g, size_t count) {
    g->names = fc_arena_calloc(b->scratch, count, sizeof *g->names);
    return g->names ? FC_OK : fc_recipe_no_memory(b);
}

static fc_code rename_input(fc_recipe_builder *b, fc_recipe_group *g) {
    fc_tensor t;
    FC_TRY(make_names(b, g, 1));
    g->names[0] = fc_recipe_spell(g->group.rule->to[0], &g->group.bindings, b->scratch);
    g->nnames = 1;
    FC_TRY(fc_recipe_same_tensor(b, g->group.inputs[0].tensor, &t));
    FC_TRY(g->names[0] ? fc_recipe_set_name(b, g->names[0], &t) : fc_recipe_no_memory(b));
    return fc_recipe_add(b, &t);
}

static fc_code run_group(fc_recipe_builder *b, fc_recipe_group *g) {
    fc_group_output *outputs = NULL;
    size_t count = 0;
    if (g->group.ninputs == 0) { /* it has only optimizer state */
        return FC_OK;
    }
    if (g->group.ninputs == 1 && fc_recipe_renames(g->group.rule)) { /* whatever the dimensions */
        return rename_input(b, g);
    }
    g->group.budget = &b->lists;
    FC_TRY(fc_group_run(b->recipe, &g->group, &outputs, &count, b->err));
    fc_code rc = make_names(b, g, count);
    for (size_t i = 0; rc == FC_OK && i < count; i++) {
        rc = add_output(b, g, &outputs[i]);
    }
    fc_group_free_outputs(outputs, count);
    fc_list_budget_give(&b->lists, count, sizeof *outputs);
    return rc;
}

/* "add": a tensor of the result under a second name. */
static fc_code add_copies(fc_recipe_builder *b) {
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
            FC_TRY(name ? fc_recipe_set_name(b, name, &t) : fc_recipe_no_memory(b));
            FC_TRY(fc_recipe_add(b, &t));
        }
    }
    return FC_OK;
}

/* ---- all of it ---- */

/* Gives a value to its rule, or to that of its parameter. Objects that no rule takes stay as they are, and so do
   tensors if the recipe keeps others. */
static fc_code give(fc_recipe_builder *b, const fc_target_tensor *w) {
    fc_recipe_bindings bindings;
    size_t pattern = 0;
    bool given = false;
    const size_t rule = fc_recipe_find_rule(b, w->name, &pattern, &bindings);
    if (rule != SIZE_MAX && b->recipe->rules[rule].kind == FC_RULE_DROP) {
        return FC_OK;
    }
    if (rule != SIZE_MAX && !w->source->object) {
        return add_input(b, rule, pattern, &bindings, w->source);
    }
    FC_TRY(fc_recipe_give_state(b, w, &given));
    if (given) {
        return FC_OK;
    }
    return w->source->object || b->recipe->keeps_others ? fc_recipe_keep(b, w) : fc_recipe_no_rule(b, w->name);
}

static fc_code check_names(const fc_recipe_builder *b) {
    const char *name = NULL;
    FC_TRY(fc_find_same_name(b->tensors, b->count, &name, b->err));
    return name ? fc_fail(b->err, FC_EUSAGE, "%s: the recipe %s makes '%.256s' twice", b->source->path,
                          b->recipe->label, name)
                : FC_OK;
}

static fc_code build_tensors(fc_recipe_builder *b) {
    b->group_names = fc_name_table_new(b->scratch, b->target->ntensors + 1);
    FC_NEED(b->group_names, b->err, b->source->path);
    FC_TRY(fc_recipe_conditions(b->recipe, b->scratch, &b->applies, b->err));
    FC_TRY(fc_recipe_begin_states(b));
    for (size_t i = 0; i < b->target->ntensors; i++) {
        FC_TRY(give(b, &b->target->tensors[i]));
    }
    for (size_t i = 0; i < b->ngroups; i++) {
        FC_TRY(run_group(b, &b->groups[i]));
    }
    FC_TRY(add_copies(b));
    FC_TRY(fc_recipe_add_states(b));
    return check_names(b);
}

/* Says what the recipe does not restore. */
static fc_code add_note(const fc_recipe *recipe, fc_checkpoint *derived, fc_error *err) {
    const char *note = derived->note;
    if (!recipe->lost) {
        return FC_OK;
    }
    derived->note = fc_arena_printf(derived->arena, "%s%sthe reversed recipe %s does not restore %s", note ? note : "",
                                    note ? "; " : "", recipe->label, recipe->lost);
    return derived->note ? FC_OK : fc_no_memory(err, derived->path);
}

/* Converts dtypes, and lets the result own the source unless it only borrows it. */
static fc_code complete(const fc_recipe *recipe, fc_checkpoint *derived, fc_checkpoint *source, fc_checkpoint **out,
                        fc_error *err) {
    fc_checkpoint *made = derived;
    derived->mesh = recipe->keeps_mesh ? source->mesh : derived->mesh;
    fc_code rc = add_note(recipe, derived, err);
    rc = rc == FC_OK ? fc_recipe_cast(recipe, &made, err) : rc;
    rc = rc == FC_OK && !recipe->borrows ? fc_recipe_derived_own(derived, err) : rc;
    if (rc != FC_OK) {
        fc_checkpoint_close(made);
        return rc;
    }
    *out = made;
    return FC_OK;
}

fc_code fc_recipe_apply(fc_checkpoint *source, const fc_target *target, const fc_recipe *recipe, fc_checkpoint **out,
                        fc_error *err) {
    fc_recipe_builder b = {.recipe = recipe, .target = target, .source = source, .scratch = fc_arena_new(), .err = err};
    *out = NULL;
    fc_list_budget_begin(&b.lists, &b.source, 1);
    fc_code rc = b.scratch ? fc_recipe_derived_new(source, &b.out, err) : fc_no_memory(err, source->path);
    rc = rc == FC_OK ? build_tensors(&b) : rc;
    for (size_t i = 0; i < b.ngroups; i++) {
        free(b.groups[i].states);
    }
    free(b.groups);
    fc_arena_free(b.scratch);
    rc = rc == FC_OK ? fc_derived_set_tensors(b.out, b.tensors, b.count, err) : rc;
    free(b.tensors);
    rc = rc == FC_OK && recipe->config_path ? fc_derived_add_header(b.out, recipe->config_path, err) : rc;
    if (rc != FC_OK) {
        fc_checkpoint_close(b.out);
        return rc;
    }
    return complete(recipe, b.out, source, out, err);
}
