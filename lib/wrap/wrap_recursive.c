/*
 * Policies that torch's _recursive_wrap runs: always, by size, by class, by name, or any of several. A policy is asked
 * top down whether to descend into a module, and bottom up whether to wrap it, with the elements that no unit below it
 * has.
 */
#include "fsdpckpt/wrap_policy.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "wrap/module_tree.h"

#include <stdlib.h>

static const char *const none[] = {NULL};
static const char *const size_leaves[] = {"MultiheadAttention", NULL};
static const char *const size_excluded[] = {"ModuleList", "ModuleDict", NULL};

static bool fits_one(const char *const *patterns, fc_name fqn) {
    for (; *patterns; patterns++) {
        if (fc_pattern_fits(*patterns, fqn)) {
            return true;
        }
    }
    return false;
}

/* Returns the first name that no module has as a class, or fits as a pattern. */
static const char *first_idle(const fc_module_tree *tree, const char *const *names, bool is_pattern) {
    for (; names && *names; names++) {
        const char *const one[] = {*names, NULL};
        size_t m = is_pattern ? 1 : 0; /* patterns are of modules below the root */
        while (m < tree->nmodules &&
               !(is_pattern ? fits_one(one, tree->modules[m].fqn) : fc_module_is_instance(&tree->modules[m], one))) {
            m++;
        }
        if (m == tree->nmodules) {
            return *names;
        }
    }
    return NULL;
}

const char *fc_wrap_term_idle(const fc_module_tree *tree, const fc_wrap_term *term, bool *is_pattern) {
    const char *idle = first_idle(tree, term->names, term->kind == FC_WRAP_NAME);
    *is_pattern = idle && term->kind == FC_WRAP_NAME;
    idle = idle ? idle : first_idle(tree, term->leaf, false);
    return idle ? idle : first_idle(tree, term->exclude, false);
}

static bool descends(const fc_wrap_term *t, const fc_module *module, int64_t numel) {
    const char *const *leaf = t->leaf ? t->leaf : t->kind == FC_WRAP_SIZE ? size_leaves : none;
    return (t->kind != FC_WRAP_SIZE || numel >= t->least) && !fc_module_is_instance(module, leaf);
}

static bool wraps(const fc_wrap_term *t, const fc_module_tree *tree, uint32_t m, int64_t numel) {
    const fc_module *module = &tree->modules[m];
    const char *const *excluded = t->exclude ? t->exclude : t->kind == FC_WRAP_SIZE ? size_excluded : none;
    if (fc_module_is_instance(module, excluded)) {
        return false;
    }
    switch (t->kind) {
    case FC_WRAP_SIZE:
        return numel >= t->least;
    case FC_WRAP_CLASS:
        return fc_module_is_instance(module, t->names);
    case FC_WRAP_NAME:
        return fits_one(t->names, module->fqn);
    case FC_WRAP_LAMBDA:
        return t->lambda(tree, m, t->user);
    case FC_WRAP_ALWAYS:
        break;
    }
    return true;
}

/* The terms, as one policy (_or_policy). */
typedef struct any {
    const fc_wrap_term *terms;
    size_t count;
} any;

static bool any_descends(const any *a, const fc_module *module, int64_t numel) {
    for (size_t i = 0; i < a->count; i++) {
        if (descends(&a->terms[i], module, numel)) {
            return true;
        }
    }
    return false;
}

static bool any_wraps(const any *a, const fc_module_tree *tree, uint32_t m, int64_t numel) {
    for (size_t i = 0; i < a->count; i++) {
        if (wraps(&a->terms[i], tree, m, numel)) {
            return true;
        }
    }
    return false;
}

/*
 * Counts the elements below each module as Module.parameters() does, a shared tensor only once. Each occurrence is
 * added, and where two consecutive occurrences meet in the tree, one is subtracted.
 */
static fc_code count_elements(const fc_module_tree *tree, int64_t *numel, uint32_t *latest, fc_error *err) {
    for (uint32_t i = 0; i < tree->nparameters; i++) {
        const fc_parameter *p = &tree->parameters[i];
        if (p->buffer || p->ignored) {
            continue;
        }
        if (!fc_add_i64(numel[p->module], p->numel, &numel[p->module])) {
            return fc_fail(err, FC_ECORRUPT, "the parameters have more than 2^63 elements");
        }
        if (p->same_as != i) {
            numel[fc_module_common_ancestor(tree, tree->parameters[latest[p->same_as]].module, p->module)] -= p->numel;
        }
        latest[p->same_as] = i;
    }
    for (uint32_t m = (uint32_t)tree->nmodules; m-- > 1;) {
        int64_t *up = &numel[tree->modules[m].parent];
        if (!fc_add_i64(*up, numel[m], up)) {
            return fc_fail(err, FC_ECORRUPT, "the parameters have more than 2^63 elements");
        }
    }
    return FC_OK;
}

typedef struct sizes {
    int64_t *numel;   /* elements below each module */
    int64_t *wrapped; /* elements below each module that are in units at or below it */
    bool *recursed;   /* whether the policy descends into the module */
    uint32_t *latest; /* the last occurrence of each shared parameter */
    uint32_t *order;  /* modules in post-order */
} sizes;

static void descend(const fc_module_tree *tree, const any *policy, const sizes *s) {
    for (uint32_t m = 0; m < tree->nmodules; m++) {
        const fc_module *module = &tree->modules[m];
        bool seen = m == 0 || (s->recursed[module->parent] && !module->ignored && module->same_as == m);
        s->recursed[m] = seen && any_descends(policy, module, s->numel[m]);
    }
}

static void choose(fc_wrap_targets *targets, const any *policy, const sizes *s) {
    const fc_module_tree *tree = targets->tree;
    for (uint32_t i = 0; i < tree->nmodules; i++) {
        uint32_t m = s->order[i];
        const fc_module *module = &tree->modules[m];
        if (module->same_as != m) { /* its elements are in the units of the earlier module that it equals */
            bool siblings = tree->modules[module->same_as].parent == module->parent;
            s->wrapped[m] = siblings ? 0 : s->wrapped[module->same_as];
            continue;
        }
        for (uint32_t c = m + 1; s->recursed[m] && c < module->end; c = tree->modules[c].end) {
            s->wrapped[m] += s->wrapped[c];
        }
        if (s->recursed[m] && m > 0 && any_wraps(policy, tree, m, s->numel[m] - s->wrapped[m])) {
            targets->chosen[m] = true;
            targets->options[m] = targets->root;
            s->wrapped[m] = s->numel[m];
        }
    }
}

fc_code fc_wrap_any(fc_wrap_targets *targets, const fc_wrap_term *terms, size_t count, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    const any policy = {terms, count};
    sizes s = {calloc(tree->nmodules, sizeof *s.numel), calloc(tree->nmodules, sizeof *s.wrapped),
               calloc(tree->nmodules, sizeof *s.recursed), calloc(tree->nparameters + 1, sizeof *s.latest),
               calloc(tree->nmodules, sizeof *s.order)};
    fc_code rc;
    FC_TRY_GOTO(s.numel && s.wrapped && s.recursed && s.latest && s.order ? count_elements(tree, s.numel, s.latest, err)
                                                                          : fc_no_memory(err, NULL),
                rc, out);
    fc_module_post_order(tree, s.order);
    descend(tree, &policy, &s);
    choose(targets, &policy, &s);
out:
    free(s.numel);
    free(s.wrapped);
    free(s.recursed);
    free(s.latest);
    free(s.order);
    return rc;
}

fc_code fc_wrap_by_size(fc_wrap_targets *targets, int64_t least, const char *const *force_leaf,
                        const char *const *exclude, fc_error *err) {
    const fc_wrap_term term = {.kind = FC_WRAP_SIZE, .least = least, .leaf = force_leaf, .exclude = exclude};
    return fc_wrap_any(targets, &term, 1, err);
}
