/*
 * The one pass that applies targets: post-order, so that a unit is made after those below it and manages what they
 * leave. Applied to a list, it gives the units of flat parameters.
 */
#include "fsdpckpt/wrap_policy.h"

#include "core/checked.h"

#include <stdlib.h>

fc_code fc_wrap_apply(const fc_wrap_targets *targets, fc_wrap_apply_fn fn, void *user, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    uint32_t *order = calloc(tree->nmodules, sizeof *order);
    if (!order) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
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

/* A list of units while it grows; the parameters of unit u are at [start[u], start[u] + its count) of `parameters`. */
typedef struct collector {
    fc_arena *arena;
    fc_unit *units;
    size_t count;
    uint32_t *place; /* of the unit of each module */
} collector;

static fc_code add_unit(const fc_module_tree *tree, uint32_t m, const fc_unit_options *options, void *user,
                        fc_error *err) {
    collector *c = user;
    fc_name fqn = tree->modules[m].fqn;
    fc_unit *u = &c->units[c->count];
    *u = (fc_unit){
        .module = m, .options = *options, .fqn = fc_arena_strndup(c->arena, fqn.text ? fqn.text : "", fqn.len)};
    c->place[m] = (uint32_t)c->count++;
    return u->fqn ? FC_OK : fc_fail(err, FC_ENOMEM, "out of memory");
}

static bool is_managed(const fc_module_tree *tree, uint32_t i) {
    const fc_parameter *p = &tree->parameters[i];
    return !p->buffer && !p->ignored && p->same_as == i;
}

/* Counted first, so that all units share one array. */
static fc_code fill(const fc_module_tree *tree, const uint32_t *unit, const collector *c, uint32_t *parameters,
                    fc_error *err) {
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        fc_unit *u = &c->units[c->place[unit[tree->parameters[i].module]]];
        if (is_managed(tree, i)) {
            u->nparameters++;
            if (!fc_add_i64(u->numel, tree->parameters[i].numel, &u->numel) ||
                !fc_add_u64(u->bytes, tree->parameters[i].bytes, &u->bytes)) {
                return fc_fail(err, FC_ECORRUPT, "unit '%.256s': its bytes do not fit 64 bits", u->fqn);
            }
        }
    }
    uint32_t *at = parameters;
    for (size_t k = 0; k < c->count; k++) {
        c->units[k].parameters = at;
        at += c->units[k].nparameters;
        c->units[k].nparameters = 0;
    }
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        fc_unit *u = &c->units[c->place[unit[tree->parameters[i].module]]];
        if (is_managed(tree, i)) {
            parameters[(size_t)(u->parameters - parameters) + u->nparameters++] = i;
        }
    }
    return FC_OK;
}

fc_code fc_wrap_units(const fc_wrap_targets *targets, fc_arena *arena, fc_units *out, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    size_t count = 1;
    for (uint32_t m = 1; m < tree->nmodules; m++) {
        count += targets->chosen[m];
    }
    uint32_t *unit = calloc(tree->nmodules, sizeof *unit);
    uint32_t *parameters = fc_arena_calloc(arena, tree->nparameters, sizeof *parameters);
    collector c = {.arena = arena,
                   .units = fc_arena_calloc(arena, count, sizeof *c.units),
                   .place = calloc(tree->nmodules, sizeof *c.place)};
    fc_code rc = unit && parameters && c.units && c.place ? fc_wrap_apply(targets, add_unit, &c, err)
                                                          : fc_fail(err, FC_ENOMEM, "out of memory");
    if (rc == FC_OK) {
        fc_wrap_unit_of(targets, unit);
        rc = fill(tree, unit, &c, parameters, err);
    }
    if (rc == FC_OK) {
        *out = (fc_units){c.units, c.count};
    }
    free(unit);
    free(c.place);
    return rc;
}
