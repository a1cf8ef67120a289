/*
 * Numbers the flat parameters as an optimizer does: in the order of the wrapped model's parameters(), group by group. A
 * module's own parameters that no unit manages come first, then its flat parameter, then those of its children. The
 * source's param_groups list the members of each group, by name or by the plain model's numbers.
 */
#include "derived/flat_units.h"
#include "derived/flatten_optim.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <jansson.h>
#include <string.h>

/* ---- names ---- */

bool fc_optim_has(const fc_optim *o, const fc_target_tensor *w, const fc_optim_name *n) {
    const fc_path *a = &o->first->path, *b = &w->path;
    bool same = n->kind != FC_OPTIM_NONE && n->levels == o->prefix.levels && n->extra == o->prefix.extra;
    for (size_t i = 0; same && i < n->levels; i++) {
        same = strcmp(a->elements[i].key, b->elements[i].key) == 0;
    }
    return same && (n->extra == 0 || memcmp(a->count ? a->elements[n->levels].key : o->first->name,
                                            b->count ? b->elements[n->levels].key : w->name, n->extra) == 0);
}

bool fc_optim_in_group(const fc_optim *o, const fc_target_tensor *w, fc_optim_name *n) {
    *n = fc_optim_name_of(w);
    return n->kind == FC_OPTIM_GROUP && fc_optim_has(o, w, n);
}

/* ---- the wrapped model's parameters ---- */

static bool is_own(const fc_module_tree *tree, uint32_t p) {
    return !tree->parameters[p].buffer && tree->parameters[p].same_as == p;
}

static fc_code make_slots(const fc_flattener *f, fc_optim *o) {
    const fc_module_tree *tree = f->tree;
    size_t *unit_at = fc_arena_calloc(o->scratch, tree->nmodules, sizeof *unit_at);
    o->slots = fc_arena_calloc(o->scratch, f->units->count + tree->nparameters, sizeof *o->slots);
    o->slot_of = fc_arena_calloc(o->scratch, tree->nparameters, sizeof *o->slot_of);
    FC_NEED(unit_at && o->slots && o->slot_of, f->err, f->source->path);
    memset(o->slot_of, 0xff, tree->nparameters * sizeof *o->slot_of);
    for (size_t u = 0; u < f->units->count; u++) {
        const fc_unit *unit = &f->units->units[u];
        unit_at[unit->module] = unit->nparameters > 0 ? u + 1 : 0;
        for (size_t i = 0; i < unit->nparameters; i++) {
            o->slot_of[unit->parameters[i]] = 0; /* any value but FC_NO_NAME: the parameter has a slot */
        }
    }
    for (size_t m = 0; m < tree->nmodules; m++) {
        const fc_module *module = &tree->modules[m];
        for (uint32_t p = module->first_parameter; p < module->first_parameter + module->nparameters; p++) {
            if (is_own(tree, p) && o->slot_of[p] == FC_NO_NAME) {
                o->slot_of[p] = o->nslots;
                o->slots[o->nslots++] = (fc_optim_slot){.parameter = p, .group = FC_NO_NAME};
            }
        }
        const fc_unit *unit = unit_at[m] ? &f->units->units[unit_at[m] - 1] : NULL;
        for (size_t i = 0; unit && i < unit->nparameters; i++) {
            o->slot_of[unit->parameters[i]] = o->nslots;
        }
        if (unit) {
            o->slots[o->nslots++] = (fc_optim_slot){.unit = unit, .group = FC_NO_NAME};
        }
    }
    for (size_t p = 0; p < tree->nparameters; p++) {
        o->slot_of[p] = o->slot_of[tree->parameters[p].same_as];
    }
    return FC_OK;
}

/* Lists the parameters by name, with and without the root's prefix. */
static fc_code list_names(const fc_flattener *f, fc_optim *o) {
    const fc_module_tree *tree = f->tree;
    size_t skip = tree->nmodules > 0 && tree->modules[0].fqn.len > 0 ? tree->modules[0].fqn.len + 1 : 0;
    o->names = fc_name_table_new(o->scratch, 2 * tree->nparameters + 1);
    for (size_t p = 0; o->names && p < tree->nparameters; p++) {
        const char *fqn = tree->parameters[p].fqn;
        const char *shorter = strlen(fqn) > skip ? fqn + skip : fqn;
        fc_name_table_put(o->names, shorter, strlen(shorter), p);
        fc_name_table_put(o->names, fqn, strlen(fqn), p);
    }
    return o->names ? FC_OK : fc_no_memory(f->err, f->source->path);
}

size_t fc_optim_parameter(const fc_flattener *f, const fc_optim *o, const fc_optim_name *n) {
    const char *name =
        n->is_number ? fc_arena_strndup(o->scratch, n->text, n->len) : fc_unwrapped(o->scratch, n->text, n->len);
    size_t p = name ? fc_name_table_find(o->names, name, strlen(name)) : FC_NO_NAME;
    return p == FC_NO_NAME ? p : f->tree->parameters[p].same_as;
}

/* ---- groups ---- */

/* Advises to exclude the optimizer: the model can still be flattened without it. */
static fc_code without_optimizer(const fc_flattener *f, fc_code rc) {
    return fc_advise(f->err, rc, FC_HINT_EXCLUDE, NULL);
}

static fc_code assign_group(const fc_flattener *f, const fc_optim *o, const char *name, size_t len, size_t group) {
    const fc_optim_name n = {.text = name, .len = len};
    size_t p = fc_optim_parameter(f, o, &n), at = p == FC_NO_NAME ? FC_NO_NAME : o->slot_of[p];
    if (at == FC_NO_NAME) {
        return without_optimizer(f, fc_fail(f->err, FC_EUSAGE,
                                            "%s: '%.256s': the optimizer has '%.*s', which is not a parameter here",
                                            f->source->path, o->first->name, (int)(len < 256 ? len : 256), name));
    }
    fc_optim_slot *slot = &o->slots[at];
    if (slot->group != FC_NO_NAME && slot->group != group) {
        fc_code rc = fc_fail(f->err, FC_EUSAGE,
                             "%s: unit '%s' holds '%.*s' and parameters of another param group: in FSDP1 a flat "
                             "parameter belongs to one group",
                             f->source->path, slot->unit ? slot->unit->fqn : "", (int)(len < 256 ? len : 256), name);
        return fc_advise(f->err, rc, FC_HINT_POLICY, NULL);
    }
    slot->group = group;
    return FC_OK;
}

/* Assigns every parameter to the single group when there are no names. */
static fc_code assign_all(const fc_flattener *f, const fc_optim *o, size_t groups) {
    for (size_t i = 0; i < o->nslots; i++) {
        o->slots[i].group = 0;
    }
    return groups == 1 ? FC_OK
                       : without_optimizer(f, fc_fail(f->err, FC_EUSAGE,
                                                      "%s: '%.256s': the optimizer numbers its parameters in several "
                                                      "groups, so their names are unknown",
                                                      f->source->path, o->first->name));
}

/* Lists the parameters by the numbers of a plain model's optimizer, one per parameter in order. */
static fc_code assign_numbers(const fc_flattener *f, fc_optim *o, const json_t *list) {
    const fc_module_tree *tree = f->tree;
    size_t n = 0, size = json_array_size(list);
    o->names = fc_name_table_new(o->scratch, size + tree->nparameters + 1);
    for (uint32_t p = 0; o->names && p < tree->nparameters; p++) {
        if (!is_own(tree, p)) {
            continue;
        }
        json_int_t number = list ? json_integer_value(json_array_get(list, n)) : (json_int_t)n;
        const char *text = fc_arena_printf(o->scratch, "%lld", (long long)number);
        FC_NEED(text, f->err, f->source->path);
        fc_name_table_put(o->names, text, strlen(text), p);
        n++;
    }
    FC_NEED(o->names, f->err, f->source->path);
    if (!list || n == size) {
        return FC_OK;
    }
    fc_code rc =
        fc_fail(f->err, FC_EUSAGE,
                "%s: '%.256s': the optimizer numbers %zu parameters, but the model has %zu: it is unknown which "
                "of them are buffers",
                f->source->path, o->first->name, size, n);
    return fc_advise(f->err, rc, FC_HINT_BUFFERS, NULL);
}

/* Sorts a group's parameters, which are names, numbers, or none. */
static fc_code assign_list(const fc_flattener *f, fc_optim *o, const json_t *list, const char *name, size_t group,
                           size_t groups) {
    if (!json_is_array(list)) {
        return fc_fail(f->err, FC_EUSAGE, "%s: '%.256s' is not a list of parameters", f->source->path, name);
    }
    if (json_array_size(list) == 0) {
        return FC_OK;
    }
    if (!json_is_string(json_array_get(list, 0))) {
        FC_TRY(assign_all(f, o, groups));
        return o->numbered ? assign_numbers(f, o, list) : FC_OK;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *parameter = json_string_value(json_array_get(list, i));
        FC_TRY(assign_group(f, o, parameter ? parameter : "", parameter ? strlen(parameter) : 0, group));
    }
    return FC_OK;
}

/* Reads one group's list of parameters. */
static fc_code read_list(const fc_flattener *f, fc_optim *o, const fc_target_tensor *w, size_t group, size_t groups) {
    const char *json = NULL;
    FC_TRY(fc_checkpoint_object_json(f->source, w->source, o->scratch, &json, f->err));
    json_t *list = json_loads(json, 0, NULL);
    fc_code rc = assign_list(f, o, list, w->name, group, groups);
    json_decref(list);
    return rc;
}

/* Finds out how the optimizer's values are named, and returns the number of its groups. */
static size_t count_groups(const fc_flattener *f, fc_optim *o) {
    size_t groups = 0;
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        fc_optim_name n = fc_optim_name_of(w);
        if (fc_optim_has(o, w, &n)) {
            o->numbered = o->numbered || (n.kind == FC_OPTIM_STATE && n.is_number);
            o->flattened = o->flattened || (n.kind == FC_OPTIM_GROUP && !n.is_number);
            groups += fc_optim_is_list(&n);
        }
    }
    return groups;
}

static fc_code read_groups(const fc_flattener *f, fc_optim *o, size_t groups) {
    size_t group = 0;
    if (f->source->format->layout_only) { /* a schema: there are no values to read */
        FC_TRY(assign_all(f, o, 1));
        return o->numbered ? assign_numbers(f, o, NULL) : FC_OK;
    }
    for (size_t i = 0; i < f->target->ntensors; i++) {
        const fc_target_tensor *w = &f->target->tensors[i];
        fc_optim_name n;
        if (!fc_optim_in_group(o, w, &n)) {
            continue;
        }
        if (!n.is_number) {
            FC_TRY(assign_group(f, o, n.text, n.len, 0));
        } else if (fc_optim_is_list(&n)) {
            FC_TRY(read_list(f, o, w, group++, groups));
        }
    }
    return FC_OK;
}

fc_code fc_optim_number(const fc_flattener *f, fc_optim *o) {
    size_t groups = count_groups(f, o), number = 0;
    FC_TRY(make_slots(f, o));
    FC_TRY(list_names(f, o));
    if (groups == 0 && !o->flattened && !f->source->format->layout_only) {
        return without_optimizer(f, fc_fail(f->err, FC_EUSAGE,
                                            "%s: '%.256s' has no param_groups, without which no optimizer can load it: "
                                            "include them",
                                            f->source->path, o->first->name));
    }
    FC_TRY(read_groups(f, o, groups));
    o->ngroups = groups > 0 ? groups : 1;
    o->members = fc_arena_calloc(o->scratch, o->ngroups, sizeof *o->members);
    FC_NEED(o->members, f->err, f->source->path);
    for (size_t g = 0; g < o->ngroups; g++) {
        for (size_t i = 0; i < o->nslots; i++) {
            if (o->slots[i].group == g) {
                o->slots[i].number = number++;
                o->members[g]++;
            }
        }
    }
    return FC_OK;
}
