/*
 * The lists of an optimizer's groups: "params" and "param_names". They get the names of the result, and they tell which
 * parameters the numbers of torch's Optimizer.state_dict stand for. The result has names in their place, as
 * get_optimizer_state_dict makes them, because the order of the new model's parameters is unknown.
 */
#include "checkpoint/parameters.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"
#include "recipe/states.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Reads a list. `*out` stays NULL if only headers are read and it is not in them. */
static fc_code read_list(const fc_recipe_builder *b, const fc_target_tensor *w, json_t **out) {
    const char *json = NULL;
    *out = NULL;
    if (b->source->format->layout_only) {
        return FC_OK;
    }
    fc_code rc = fc_checkpoint_object_json(b->source, w->source, b->scratch, &json, b->err);
    if (rc != FC_OK) {
        return b->recipe->headers_only ? FC_OK : rc;
    }
    *out = json_loads(json, 0, NULL);
    return json_is_array(*out) ? FC_OK : fc_recipe_refuse_state(b, w, "is not a list of parameters");
}

/* ---- numbers ---- */

/* Records that `number` of an optimizer stands for a parameter. */
static fc_code add_number(const fc_recipe_builder *b, const char *optimizer, json_int_t number, const char *parameter) {
    fc_recipe_states *s = b->states;
    const char *key = fc_arena_printf(b->scratch, "%s %lld", optimizer, (long long)number);
    const char *name = fc_arena_strndup(b->scratch, parameter, strlen(parameter));
    FC_NEED(key && name && s->nparameters <= b->target->ntensors, b->err, b->source->path);
    fc_name_table_put(s->numbers, key, strlen(key), s->nparameters);
    s->parameters[s->nparameters++] = name;
    return FC_OK;
}

/* Finds the other list of a group, or counts the lists of its optimizer. */
static const fc_target_tensor *find_list(const fc_recipe_builder *b, const fc_target_tensor *like,
                                         const fc_optim_name *n, const char *optimizer, const char *key,
                                         size_t *count) {
    const fc_target_tensor *found = NULL;
    *count = 0;
    for (size_t i = 0; i < b->target->ntensors; i++) {
        const fc_target_tensor *w = &b->target->tensors[i];
        const fc_optim_name m = w->source->object ? fc_optim_name_of(w) : (fc_optim_name){0};
        if (m.kind != FC_OPTIM_GROUP || !m.is_number || !m.key || strcmp(m.key, key) != 0) {
            continue;
        }
        const char *its = fc_recipe_optimizer(b, w, &m);
        const bool same = its && strcmp(its, optimizer) == 0;
        *count += same;
        found = same && w != like && m.len == n->len && memcmp(m.text, n->text, n->len) == 0 ? w : found;
    }
    return found;
}

/* Numbers the parameters of the model in their order. */
static fc_code number_in_order(const fc_recipe_builder *b, const fc_target_tensor *w, const char *optimizer,
                               const json_t *list) {
    const fc_tensor **tensors = fc_arena_calloc(b->scratch, b->target->ntensors + 1, sizeof *tensors);
    size_t *same_as = fc_arena_calloc(b->scratch, b->target->ntensors + 1, sizeof *same_as), count = 0, n = 0;
    const char **names = fc_arena_calloc(b->scratch, b->target->ntensors + 1, sizeof *names), *why = NULL;
    FC_NEED(tensors && same_as && names, b->err, b->source->path);
    if (!fc_knows_model_order(b->source, &why)) {
        why = fc_arena_printf(b->scratch, "numbers the parameters, and their order is unknown: %s", why);
        return why ? fc_recipe_refuse_state(b, w, why) : fc_recipe_no_memory(b);
    }
    for (size_t i = 0; i < b->target->ntensors; i++) {
        const fc_target_tensor *t = &b->target->tensors[i];
        if (!t->source->object && fc_optim_name_of(t).kind == FC_OPTIM_NONE &&
            !fc_is_buffer(t->name, t->source->dtype)) {
            names[count] = t->name;
            tensors[count++] = t->source;
        }
    }
    FC_TRY(fc_find_ties(b->source, tensors, count, same_as, b->err));
    for (size_t i = 0; i < count; i++) {
        if (same_as[i] == i && n < json_array_size(list)) {
            FC_TRY(add_number(b, optimizer, json_integer_value(json_array_get(list, n)), names[i]));
        }
        n += same_as[i] == i;
    }
    if (n == json_array_size(list)) {
        return FC_OK;
    }
    why = fc_arena_printf(b->scratch, "numbers %zu parameters, but the model has %zu", json_array_size(list), n);
    return why ? fc_recipe_refuse_state(b, w, why) : fc_recipe_no_memory(b);
}

static fc_code number_by_names(const fc_recipe_builder *b, const fc_target_tensor *w, const char *optimizer,
                               const json_t *list, const json_t *names) {
    const size_t count = json_array_size(list);
    for (size_t i = 0; i < count; i++) {
        const char *name = json_string_value(json_array_get(names, i));
        if (!name || json_array_size(names) != count) {
            return fc_recipe_refuse_state(b, w, "does not fit the param_names of its group");
        }
        FC_TRY(add_number(b, optimizer, json_integer_value(json_array_get(list, i)), name));
    }
    return FC_OK;
}

/* Numbers the parameters of one group, if its list has numbers. */
static fc_code number_group(const fc_recipe_builder *b, const fc_target_tensor *w, const fc_optim_name *n) {
    size_t groups, ignored;
    json_t *list = NULL, *names = NULL;
    const char *optimizer = fc_recipe_optimizer(b, w, n);
    fc_code rc;
    FC_TRY_GOTO(optimizer ? read_list(b, w, &list) : fc_recipe_no_memory(b), rc, out);
    if (!json_is_integer(json_array_get(list, 0))) {
        goto out;
    }
    const fc_target_tensor *named = find_list(b, w, n, optimizer, "param_names", &ignored);
    FC_TRY_GOTO(named ? read_list(b, named, &names) : FC_OK, rc, out);
    find_list(b, w, n, optimizer, "params", &groups);
    rc = names ? number_by_names(b, w, optimizer, list, names)
         : groups == 1
             ? number_in_order(b, w, optimizer, list)
             : fc_recipe_refuse_state(b, w,
                                      "numbers the parameters of one of several groups, so their names are "
                                      "unknown; save with get_optimizer_state_dict, or with named parameters");
out:
    json_decref(list);
    json_decref(names);
    return rc;
}

fc_code fc_recipe_number_parameters(fc_recipe_builder *b) {
    fc_recipe_states *s = b->states;
    const size_t count = b->target->ntensors;
    bool any = false;
    for (size_t i = 0; i < count && !any; i++) {
        const fc_optim_name n = fc_optim_name_of(&b->target->tensors[i]);
        any = n.kind == FC_OPTIM_STATE && n.is_number;
    }
    if (!any) {
        return FC_OK;
    }
    s->numbers = fc_name_table_new(b->scratch, count + 1);
    s->parameters = fc_arena_calloc(b->scratch, count + 1, sizeof *s->parameters);
    FC_NEED(s->numbers && s->parameters, b->err, b->source->path);
    for (size_t i = 0; i < count; i++) {
        const fc_target_tensor *w = &b->target->tensors[i];
        const fc_optim_name n = fc_optim_name_of(w);
        FC_TRY(fc_optim_is_list(&n) ? number_group(b, w, &n) : FC_OK);
    }
    return FC_OK;
}

fc_code fc_recipe_numbered(const fc_recipe_builder *b, const fc_target_tensor *w, const fc_optim_name *n,
                           const char **out) {
    const fc_recipe_states *s = b->states;
    const char *optimizer = fc_recipe_optimizer(b, w, n);
    const char *key = optimizer ? fc_arena_printf(b->scratch, "%s %.*s", optimizer, (int)n->len, n->text) : NULL;
    FC_NEED(key, b->err, b->source->path);
    const size_t at = s->numbers ? fc_name_table_find(s->numbers, key, strlen(key)) : FC_NO_NAME;
    *out = at == FC_NO_NAME ? NULL : s->parameters[at];
    return *out ? FC_OK
                : fc_recipe_refuse_state(b, w, "numbers its parameter, and no list of param_groups has the number");
}

/* ---- the new lists ---- */

bool fc_recipe_is_whole_list(const fc_target_tensor *w) {
    static const char last[] = "param_groups";
    const size_t len = strlen(w->name), n = sizeof last - 1;
    return w->source->object && len >= n && strcmp(w->name + len - n, last) == 0 &&
           (len == n || w->name[len - n - 1] == '.');
}

fc_code fc_recipe_group_names(const fc_recipe_builder *b, fc_recipe_group *g) {
    const fc_recipe_rule *rule = g->group.rule;
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    if (g->nnames > 0) {
        return FC_OK;
    }
    if (fc_recipe_only(rule->to, rule->nto, rule->from, rule->nfrom, inner) > 0) {
        return fc_recipe_refuse_state(b, g->states[0].value,
                                      "is split into as many tensors as its parameter, which is missing");
    }
    g->names = fc_arena_calloc(b->scratch, rule->nto, sizeof *g->names);
    for (size_t i = 0; g->names && i < rule->nto; i++) {
        g->names[i] = fc_recipe_output_name(b, &g->group, &(fc_group_output){.pattern = i});
        FC_NEED(g->names[i], b->err, b->source->path);
        g->nnames++;
    }
    return g->names ? FC_OK : fc_recipe_no_memory(b);
}

/* A list that is being made. */
typedef struct list {
    const fc_target_tensor *of;
    size_t number; /* from 1 */
    json_t *names;
} list;

static fc_code append(const fc_recipe_builder *b, const list *l, const char *name) {
    return json_array_append_new(l->names, json_string(name)) == 0 ? FC_OK : fc_recipe_no_memory(b);
}

/* Finds the name that an element of a list stands for. */
static fc_code parameter_of(const fc_recipe_builder *b, const list *l, const json_t *element, const char **out) {
    fc_optim_name n = fc_optim_name_of(l->of);
    *out = json_string_value(element);
    if (json_is_integer(element)) {
        n.text = fc_arena_printf(b->scratch, "%lld", (long long)json_integer_value(element));
        n.len = n.text ? strlen(n.text) : 0;
        return n.text ? fc_recipe_numbered(b, l->of, &n, out) : fc_recipe_no_memory(b);
    }
    return *out ? FC_OK : fc_recipe_refuse_state(b, l->of, "is not a list of parameters");
}

/* Appends what becomes of a parameter. */
static fc_code append_parameter(fc_recipe_builder *b, const list *l, const char *parameter) {
    fc_recipe_bindings bindings;
    size_t pattern = 0, at = 0;
    uint64_t ignored[FC_RECIPE_VARIABLES];
    const char *name = fc_arena_strndup(b->scratch, parameter, strlen(parameter)); /* the bindings refer to it */
    const size_t rule = name ? fc_recipe_find_rule(b, name, &pattern, &bindings) : SIZE_MAX;
    if (rule == SIZE_MAX) {
        return !name                     ? fc_recipe_no_memory(b)
               : b->recipe->keeps_others ? append(b, l, name)
                                         : fc_recipe_no_rule(b, name);
    }
    if (b->recipe->rules[rule].kind == FC_RULE_DROP) {
        return FC_OK;
    }
    FC_TRY(fc_recipe_find_group(b, rule, &bindings, ignored, &at));
    fc_recipe_group *g = &b->groups[at];
    if (g->group.ninputs == 0 && g->nstates == 0) {
        const char *why = fc_arena_printf(b->scratch, "lists '%s', which is missing", name);
        return why ? fc_recipe_refuse_state(b, l->of, why) : fc_recipe_no_memory(b);
    }
    g->listed = g->list == l->number ? g->listed + 1 : 1;
    if (g->list == l->number) {
        return FC_OK;
    }
    g->list = l->number;
    FC_TRY(fc_recipe_group_names(b, g));
    for (size_t i = 0; i < g->nnames; i++) {
        FC_TRY(append(b, l, g->names[i]));
    }
    return FC_OK;
}

/* Parameters that are joined must be in one group. */
static fc_code check_joined(const fc_recipe_builder *b, const list *l) {
    for (size_t i = 0; i < b->ngroups; i++) {
        const fc_recipe_group *g = &b->groups[i];
        if (g->list == l->number && g->group.ninputs > 0 && g->listed != g->group.ninputs) {
            const char *why = fc_arena_printf(
                b->scratch, "has only %zu of the %zu parameters that the recipe joins as '%s': they need one group",
                g->listed, g->group.ninputs, g->names[0]);
            return why ? fc_recipe_refuse_state(b, l->of, why) : fc_recipe_no_memory(b);
        }
    }
    return FC_OK;
}

static fc_code fill_list(fc_recipe_builder *b, const list *l, const json_t *from) {
    for (size_t i = 0; i < json_array_size(from); i++) {
        const char *parameter;
        FC_TRY(parameter_of(b, l, json_array_get(from, i), &parameter));
        FC_TRY(append_parameter(b, l, parameter));
    }
    return check_joined(b, l);
}

/* Makes a list anew: names of the result in place of those in `from`, which it releases. */
static fc_code new_list(fc_recipe_builder *b, list *l, const json_t *from) {
    json_decref(l->names);
    l->names = json_array();
    l->number++;
    return l->names ? fill_list(b, l, from) : fc_recipe_no_memory(b);
}

/* Whether each value can be written again: tuples and floats that JSON does not have can, other types cannot. */
static bool is_plain(const json_t *value) { // NOLINT(misc-no-recursion): as deep as the groups nest
    const char *key;
    json_t *member;
    size_t i;
    bool plain = true;
    json_array_foreach((json_t *)value, i, member) {
        plain = plain && is_plain(member);
    }
    json_object_foreach((json_t *)value, key, member) {
        plain = plain && (*key != '$' || strcmp(key, "$tuple") == 0 || strcmp(key, "$float") == 0) && is_plain(member);
    }
    return plain;
}

/* The groups as one object, as torch 1.13 and 2.0 store them. */
static fc_code change_groups(fc_recipe_builder *b, list *l, json_t *groups) {
    static const char *const keys[] = {"params", "param_names"};
    json_t *group;
    size_t i;
    if (!is_plain(groups)) {
        return fc_recipe_refuse_state(b, l->of, "has a value of a type that cannot be written again");
    }
    json_array_foreach(groups, i, group) {
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            const json_t *from = json_object_get(group, keys[k]);
            FC_TRY(from ? new_list(b, l, from) : FC_OK);
            if (from && json_object_set(group, keys[k], l->names) != 0) {
                return fc_recipe_no_memory(b);
            }
        }
    }
    json_decref(l->names);
    l->names = json_incref(groups);
    return FC_OK;
}

static fc_code add_list(fc_recipe_builder *b, const list *l) {
    char *text = json_dumps(l->names, 0);
    const char *json = text ? fc_arena_strndup(b->out->arena, text, strlen(text)) : NULL;
    fc_tensor t;
    free(text);
    FC_TRY(json ? fc_recipe_object(b, json, &t) : fc_recipe_no_memory(b));
    FC_TRY(fc_recipe_set_path(b, l->of->path.elements, l->of->path.count, &t));
    return fc_recipe_add(b, &t);
}

fc_code fc_recipe_add_lists(fc_recipe_builder *b) {
    list l = {0};
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < b->states->nlists; i++) {
        json_t *from = NULL;
        l.of = b->states->lists[i];
        FC_TRY_GOTO(read_list(b, l.of, &from), rc, next);
        FC_TRY_GOTO(!from                           ? FC_OK
                    : fc_recipe_is_whole_list(l.of) ? change_groups(b, &l, from)
                                                    : new_list(b, &l, from),
                    rc, next);
        rc = from ? add_list(b, &l) : fc_recipe_keep(b, l.of);
    next:
        json_decref(from);
    }
    json_decref(l.names);
    return rc;
}
