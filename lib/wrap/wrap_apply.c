/*
 * Applies targets in post-order, so that each unit is created after the units below it and manages the parameters that
 * they leave. Collecting the results in a list yields the units of flat parameters.
 */
#include "fsdpckpt/wrap_policy.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>

fc_code fc_wrap_apply(const fc_wrap_targets *targets, fc_wrap_apply_fn fn, void *user, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    uint32_t *order = calloc(tree->nmodules, sizeof *order);
    FC_NEED(order, err, NULL);
    fc_module_post_order(tree, order);
    fc_code rc = FC_OK;
    for (uint32_t i = 0; i < tree->nmodules && rc == FC_OK; i++) {
        uint32_t m = order[i];
        if (m == 0) {
            rc = fn(tree, 0, &targets->root, user, err);
        } else if (targets->chosen[m]) {
            rc = fn(tree, m, &targets->options[m], user, err);
        }
    }
    free(order);
    return rc;
}

/* A list of units while it is built. */
typedef struct collector {
    fc_arena *arena;
    fc_unit *units;
    size_t count;
    uint32_t *place; /* per module: the index of its unit */
} collector;

static fc_code add_unit(const fc_module_tree *tree, uint32_t m, const fc_unit_options *options, void *user,
                        fc_error *err) {
    collector *c = user;
    fc_name fqn = tree->modules[m].fqn;
    fc_unit *u = &c->units[c->count];
    *u = (fc_unit){
        .module = m, .options = *options, .fqn = fc_arena_strndup(c->arena, fqn.text ? fqn.text : "", fqn.len)};
    c->place[m] = (uint32_t)c->count++;
    return u->fqn ? FC_OK : fc_no_memory(err, NULL);
}

static bool is_managed(const fc_parameter *p) {
    return !p->buffer && !p->ignored;
}

/* Counts what each unit manages, so that all units can share one array of parameters and one of names. */
static fc_code count(const fc_module_tree *tree, const uint32_t *unit, const collector *c, fc_error *err) {
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        const fc_parameter *p = &tree->parameters[i];
        fc_unit *u = &c->units[c->place[unit[p->module]]];
        if (!is_managed(p)) {
            continue;
        }
        u->nnames++;
        if (p->same_as != i) {
            continue;
        }
        u->nparameters++;
        if (!fc_add_i64(u->numel, p->numel, &u->numel) || !fc_add_u64(u->bytes, p->bytes, &u->bytes)) {
            return fc_fail(err, FC_ECORRUPT, "unit '%.256s': its size exceeds 64 bits", u->fqn);
        }
    }
    return FC_OK;
}

static void fill_units(const fc_module_tree *tree, const uint32_t *unit, const collector *c, uint32_t *parameters,
                       uint32_t *names) {
    size_t first = 0, first_name = 0;
    for (size_t k = 0; k < c->count; k++) {
        fc_unit *u = &c->units[k];
        u->parameters = parameters + first;
        u->names = names + first_name;
        first += u->nparameters;
        first_name += u->nnames;
        u->nparameters = u->nnames = 0;
    }
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        const fc_parameter *p = &tree->parameters[i];
        fc_unit *u = &c->units[c->place[unit[p->module]]];
        if (is_managed(p)) {
            names[(size_t)(u->names - names) + u->nnames++] = i;
        }
        if (is_managed(p) && p->same_as == i) {
            parameters[(size_t)(u->parameters - parameters) + u->nparameters++] = i;
        }
    }
}

fc_code fc_wrap_units(const fc_wrap_targets *targets, fc_arena *arena, fc_units *out, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    size_t most = 1;
    for (uint32_t m = 1; m < tree->nmodules; m++) {
        most += targets->chosen[m];
    }
    uint32_t *unit = fc_arena_calloc(arena, tree->nmodules, sizeof *unit);
    uint32_t *parameters = fc_arena_calloc(arena, tree->nparameters, sizeof *parameters);
    uint32_t *names = fc_arena_calloc(arena, tree->nparameters, sizeof *names);
    collector c = {.arena = arena,
                   .units = fc_arena_calloc(arena, most, sizeof *c.units),
                   .place = fc_arena_calloc(arena, tree->nmodules, sizeof *c.place)};
    FC_NEED(unit && parameters && names && c.units && c.place, err, NULL);
    FC_TRY(fc_wrap_apply(targets, add_unit, &c, err));
    fc_wrap_unit_of(targets, unit);
    FC_TRY(count(tree, unit, &c, err));
    fill_units(tree, unit, &c, parameters, names);
    *out = (fc_units){c.units, c.count};
    return FC_OK;
}

fc_code fc_unit_flat_descs(const fc_module_tree *tree, const fc_unit *unit, fc_arena *arena, const fc_flat_desc **out,
                           fc_error *err) {
    fc_flat_desc *descs = fc_arena_calloc(arena, unit->nnames, sizeof *descs);
    FC_NEED(descs, err, NULL);
    for (size_t i = 0; i < unit->nnames; i++) {
        const fc_parameter *p = &tree->parameters[unit->names[i]];
        descs[i] = (fc_flat_desc){.fqn = p->fqn,
                                  .ndim = p->ndim,
                                  .shape = p->shape,
                                  .dtype = p->dtype,
                                  .requires_grad = !p->frozen,
                                  .shared_with = -1};
        for (size_t k = 0; k < i && p->same_as != unit->names[i] && descs[i].shared_with < 0; k++) {
            descs[i].shared_with = unit->names[k] == p->same_as ? (int64_t)k : -1;
        }
    }
    *out = descs;
    return FC_OK;
}
