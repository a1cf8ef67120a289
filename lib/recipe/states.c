/*
 * Optimizer state follows its parameter through a recipe. State with the shape of its parameter gets the parameter's
 * new name and layout. A single number, such as a step, or an object, such as a learning rate, goes to each tensor that
 * is made of the parameter; where parameters are joined, theirs must be equal.
 */
#include "recipe/states.h"

#include "base/grow.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* States of one kind of a group: one for each of its tensors. */
typedef struct run {
    const fc_recipe_state *states;
    size_t count;
} run;

fc_code fc_recipe_refuse_state(const fc_recipe_builder *b, const fc_target_tensor *w, const char *why) {
    fc_code rc = fc_fail(b->err, FC_EUSAGE, "%s: '%.256s' %s", b->source->path, w->name, why);
    return fc_advise(b->err, rc, FC_HINT_EXCLUDE, w->name);
}

/* ---- giving ---- */

const char *fc_recipe_optimizer(const fc_recipe_builder *b, const fc_target_tensor *w, const fc_optim_name *n) {
    const char *text = "";
    for (size_t i = 0; text && i < n->levels; i++) {
        text = fc_arena_printf(b->scratch, "%s%s.", text, w->path.elements[i].key);
    }
    const char *rest = w->path.count > 0 ? w->path.elements[n->levels].key : w->name;
    return text ? fc_arena_printf(b->scratch, "%s%.*s", text, (int)n->extra, rest) : NULL;
}

static fc_code find_kind(fc_recipe_builder *b, fc_recipe_state *s) {
    fc_recipe_states *all = b->states;
    const char *optimizer = fc_recipe_optimizer(b, s->value, &s->name);
    const char *key = optimizer ? fc_arena_printf(b->scratch, "%d %s %s", s->name.kind, optimizer, s->name.key) : NULL;
    FC_NEED(key, b->err, b->source->path);
    s->kind = fc_name_table_put(all->kinds, key, strlen(key), all->nkinds);
    all->nkinds += s->kind == all->nkinds;
    return FC_OK;
}

static fc_code find_parameter(const fc_recipe_builder *b, const fc_recipe_state *s, const char **out) {
    if (s->name.kind == FC_OPTIM_STATE && s->name.is_number) {
        return fc_recipe_numbered(b, s->value, &s->name, out);
    }
    *out = fc_arena_strndup(b->scratch, s->name.text, s->name.len);
    return *out ? FC_OK : fc_recipe_no_memory(b);
}

static const char *section(const fc_recipe_state *s) {
    return s->name.kind == FC_OPTIM_STATE ? "state" : "param_groups";
}

/* Names a value after the new name of its parameter, in the spelling of the old one. */
static fc_code name_state(const fc_recipe_builder *b, const fc_recipe_state *s, const char *parameter, fc_tensor *t) {
    const fc_optim_name *n = &s->name;
    const fc_path *path = &s->value->path;
    const bool nested = path->count >= n->levels + 3;
    fc_path_element *to = fc_arena_calloc(b->scratch, n->levels + 3, sizeof *to);
    FC_NEED(to, b->err, b->source->path);
    if (n->levels > 0) {
        memcpy(to, path->elements, n->levels * sizeof *to);
    }
    if (nested) {
        to[n->levels].key = section(s);
        to[n->levels + 1].key = parameter;
        to[n->levels + 2].key = n->key;
        return fc_recipe_set_path(b, to, n->levels + 3, t);
    }
    const char *rest = path->count > 0 ? path->elements[n->levels].key : s->value->name;
    to[n->levels].key =
        fc_arena_printf(b->scratch, "%.*s%s%s.%s.%s", (int)n->extra, rest, n->extra > 0 ? "." : "", section(s),
                        n->key_first ? n->key : parameter, n->key_first ? parameter : n->key);
    return to[n->levels].key ? fc_recipe_set_path(b, to, n->levels + 1, t) : fc_recipe_no_memory(b);
}

/* Adds a value unchanged, under the name of a parameter. */
static fc_code add_same(fc_recipe_builder *b, const fc_recipe_state *s, const char *parameter, bool second) {
    fc_tensor t;
    FC_TRY(second ? fc_recipe_second_tensor(b, s->value->source, &t) : fc_recipe_same_tensor(b, s->value->source, &t));
    FC_TRY(name_state(b, s, parameter, &t));
    return fc_recipe_add(b, &t);
}

static fc_code add_state(fc_recipe_builder *b, size_t rule, fc_recipe_bindings *bindings, fc_recipe_state *s) {
    size_t at = 0;
    FC_TRY(find_kind(b, s));
    FC_TRY(fc_recipe_find_group(b, rule, bindings, s->input.numbers, &at));
    fc_recipe_group *g = &b->groups[at];
    FC_NEED(fc_grow(&g->states, &g->state_capacity, g->nstates + 1, sizeof *g->states), b->err, b->source->path);
    g->states[g->nstates++] = *s;
    return FC_OK;
}

fc_code fc_recipe_begin_states(fc_recipe_builder *b) {
    fc_recipe_states *s = fc_arena_calloc(b->scratch, 1, sizeof *s);
    FC_NEED(s, b->err, b->source->path);
    b->states = s;
    s->kinds = fc_name_table_new(b->scratch, 0);
    s->lists = fc_arena_calloc(b->scratch, b->target->ntensors + 1, sizeof *s->lists);
    return s->kinds && s->lists ? fc_recipe_number_parameters(b) : fc_recipe_no_memory(b);
}

fc_code fc_recipe_give_state(fc_recipe_builder *b, const fc_target_tensor *w, bool *given) {
    fc_recipe_state s = {.value = w, .name = fc_optim_name_of(w), .input.tensor = w->source};
    fc_recipe_bindings bindings;
    const char *parameter;
    *given = false;
    if (s.name.kind == FC_OPTIM_NONE || (s.name.kind == FC_OPTIM_GROUP && s.name.is_number)) {
        *given = fc_recipe_is_whole_list(w) ||
                 (s.name.key && (fc_optim_is_list(&s.name) || strcmp(s.name.key, "param_names") == 0));
        b->states->lists[b->states->nlists] = w;
        b->states->nlists += *given;
        return FC_OK;
    }
    *given = true;
    if (!s.name.key) {
        return fc_recipe_refuse_state(b, w, "is nested deeper than in torch's optimizers");
    }
    FC_TRY(find_parameter(b, &s, &parameter));
    const size_t rule = fc_recipe_find_rule(b, parameter, &s.input.pattern, &bindings);
    if (rule == SIZE_MAX) {
        return b->recipe->keeps_others ? add_same(b, &s, parameter, false) : fc_recipe_no_rule(b, parameter);
    }
    return b->recipe->rules[rule].kind == FC_RULE_DROP ? FC_OK : add_state(b, rule, &bindings, &s);
}

/* ---- adding ---- */

static int compare_state_kinds(const void *a, const void *b) {
    const fc_recipe_state *x = a, *y = b;
    return x->kind != y->kind ? (x->kind > y->kind) - (x->kind < y->kind) : fc_group_by_place(&x->input, &y->input);
}

/* Each tensor of the group must have the state, or none. */
static fc_code check_complete(const fc_recipe_builder *b, const fc_recipe_group *g, const run *r) {
    const fc_group *of = &g->group;
    size_t i = 0;
    while (i < of->ninputs && i < r->count && fc_group_by_place(&of->inputs[i], &r->states[i].input) == 0) {
        i++;
    }
    if (of->ninputs == 0 || (i == of->ninputs && i == r->count)) {
        return FC_OK;
    }
    const char *why =
        i < of->ninputs
            ? fc_arena_printf(b->scratch, "exists, but not for '%s', which the recipe joins with its parameter",
                              of->inputs[i].tensor->name)
            : "exists twice";
    return why ? fc_recipe_refuse_state(b, r->states[0].value, why) : fc_recipe_no_memory(b);
}

static bool is_number(const fc_tensor *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) {
        numel = t->shape[d] == 1 ? numel : 0;
    }
    return t->object || numel == 1;
}

static bool same_shape(const fc_tensor *a, const fc_tensor *b) {
    return fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape);
}

/* Whether all states have the shapes of their parameters, and are no step counts. Where the parameters are elsewhere,
   anything but a number is assumed to have it, and the operations compare the shapes. */
static bool is_elementwise(const fc_recipe_group *g, const run *r) {
    for (size_t i = 0; i < r->count; i++) {
        const fc_tensor *t = r->states[i].value->source;
        if (t->object || (g->group.ninputs > 0 ? !same_shape(t, g->group.inputs[i].tensor) : is_number(t))) {
            return false;
        }
    }
    return strcmp(r->states[0].name.key, "step") != 0;
}

/* Adds one tensor that the rule made of states. */
static fc_code add_output(fc_recipe_builder *b, const run *r, const char *parameter, const fc_group_output *o) {
    fc_tensor t;
    FC_TRY(fc_parted_is_same(&o->tensor) ? fc_recipe_same_tensor(b, o->tensor.parts->source, &t)
                                         : fc_recipe_made_tensor(b, &o->tensor, &t));
    FC_TRY(name_state(b, r->states, parameter, &t));
    return fc_recipe_add(b, &t);
}

/* Applies the rule to the states as to their parameters. */
static fc_code rearrange(fc_recipe_builder *b, fc_recipe_group *g, const run *r) {
    fc_group group = {.rule = g->group.rule, .bindings = g->group.bindings, .ninputs = r->count, .budget = &b->lists};
    fc_group_output *outputs = NULL;
    size_t count = 0;
    group.inputs = fc_arena_calloc(b->scratch, r->count, sizeof *group.inputs);
    FC_NEED(group.inputs, b->err, b->source->path);
    for (size_t i = 0; i < r->count; i++) {
        group.inputs[i] = r->states[i].input;
    }
    FC_TRY(fc_group_run(b->recipe, &group, &outputs, &count, b->err));
    const char **names = fc_arena_calloc(b->scratch, count, sizeof *names);
    fc_code rc = names ? FC_OK : fc_recipe_no_memory(b);
    for (size_t i = 0; names && rc == FC_OK && i < count; i++) {
        names[i] = fc_recipe_output_name(b, &group, &outputs[i]);
        rc = names[i] ? add_output(b, r, names[i], &outputs[i]) : fc_recipe_no_memory(b);
    }
    fc_group_free_outputs(outputs, count);
    fc_list_budget_give(&b->lists, count, sizeof *outputs);
    g->names = names;
    g->nnames = rc == FC_OK ? count : 0;
    return rc;
}

/* Reads a number or an object as text. */
static fc_code read_value(const fc_recipe_builder *b, const fc_tensor *t, const char **out) {
    static const int64_t origin[FC_MAX_DIMS];
    const fc_box all = {t->ndim, origin, t->shape};
    unsigned char value[16] = {0};
    char *text = fc_arena_alloc(b->scratch, sizeof value * 2 + 1);
    if (t->object) {
        return fc_checkpoint_object_json(b->source, t, b->scratch, out, b->err);
    }
    FC_NEED(text, b->err, b->source->path);
    FC_TRY(fc_read_box(b->source, t, &all, t->dtype, value, b->err));
    for (size_t i = 0; i < sizeof value; i++) {
        text[2 * i] = (char)('a' + (value[i] >> 4));
        text[2 * i + 1] = (char)('a' + (value[i] & 15));
    }
    text[sizeof value * 2] = '\0';
    *out = text;
    return FC_OK;
}

static fc_code check_equal(const fc_recipe_builder *b, const run *r) {
    const fc_tensor *first = r->states[0].value->source;
    const char *value = NULL, *other = NULL;
    if (r->count == 1 || b->source->format->layout_only || b->recipe->headers_only) {
        return FC_OK;
    }
    FC_TRY(read_value(b, first, &value));
    for (size_t i = 1; i < r->count; i++) {
        const fc_tensor *t = r->states[i].value->source;
        const bool same =
            !t->object == !first->object && (t->object || (t->dtype == first->dtype && same_shape(t, first)));
        FC_TRY(same ? read_value(b, t, &other) : FC_OK);
        if (!same || strcmp(value, other) != 0) {
            const char *why = fc_arena_printf(
                b->scratch,
                "differs from '%s', but the recipe joins their parameters into one, which can have only one such value",
                r->states[0].value->name);
            return why ? fc_recipe_refuse_state(b, r->states[i].value, why) : fc_recipe_no_memory(b);
        }
    }
    return FC_OK;
}

/* Adds one value for each tensor that the group makes. */
static fc_code share(fc_recipe_builder *b, fc_recipe_group *g, const run *r) {
    for (size_t i = 0; i < r->count; i++) {
        if (!is_number(r->states[i].value->source) && !fc_recipe_renames(g->group.rule)) {
            return fc_recipe_refuse_state(b, r->states[i].value,
                                          "has another shape than its parameter, which the recipe rearranges, so it is "
                                          "unknown how to rearrange it");
        }
    }
    FC_TRY(check_equal(b, r));
    FC_TRY(fc_recipe_group_names(b, g));
    for (size_t i = 0; i < g->nnames; i++) {
        FC_TRY(add_same(b, r->states, g->names[i], i > 0));
    }
    return FC_OK;
}

/* Adds the states of a group: first those that tell what the group makes. */
static fc_code add_group_states(fc_recipe_builder *b, fc_recipe_group *g) {
    fc_sort_items(g->states, g->nstates, sizeof *g->states, compare_state_kinds);
    for (int shared = 0; shared < 2; shared++) {
        for (size_t i = 0, end; i < g->nstates; i = end) {
            for (end = i + 1; end < g->nstates && g->states[end].kind == g->states[i].kind; end++) {
            }
            const run r = {g->states + i, end - i};
            FC_TRY(shared == 0 ? check_complete(b, g, &r) : FC_OK);
            const bool elementwise = is_elementwise(g, &r) && !fc_recipe_renames(g->group.rule);
            if (elementwise == (shared == 0)) {
                FC_TRY(elementwise ? rearrange(b, g, &r) : share(b, g, &r));
            }
        }
    }
    return FC_OK;
}

fc_code fc_recipe_add_states(fc_recipe_builder *b) {
    for (size_t i = 0; i < b->ngroups; i++) {
        FC_TRY(b->groups[i].nstates > 0 ? add_group_states(b, &b->groups[i]) : FC_OK);
    }
    return fc_recipe_add_lists(b);
}
