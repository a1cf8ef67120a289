/*
 * Policies: choose the modules of a tree that become FSDP units, and their options. Nothing is applied here, so a
 * policy can walk the tree as often as it likes; wrap_apply.c applies the result in one pass.
 */
#include "fsdpckpt/wrap_policy.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "wrap/module_tree.h"

#include <stdlib.h>
#include <string.h>

static bool is_one_of(const char *class, const char *const *classes) {
    for (; classes && *classes; classes++) {
        if (strcmp(class, *classes) == 0) {
            return true;
        }
    }
    return false;
}

bool fc_module_is_instance(const fc_module *m, const char *const *classes) {
    for (size_t i = 0; i < m->nclasses; i++) {
        if (is_one_of(m->classes[i], classes)) {
            return true;
        }
    }
    return false;
}

fc_code fc_wrap_targets_new(const fc_module_tree *tree, const fc_unit_options *root, fc_arena *arena,
                            fc_wrap_targets *out, fc_error *err) {
    *out = (fc_wrap_targets){.tree = tree, .root = *root};
    out->chosen = fc_arena_calloc(arena, tree->nmodules, sizeof *out->chosen);
    out->options = fc_arena_calloc(arena, tree->nmodules, sizeof *out->options);
    return out->chosen && out->options ? FC_OK : fc_no_memory(err, NULL);
}

/* A module that is the same as an earlier one was already considered there. */
static bool is_considered(const fc_module_tree *tree, uint32_t m) {
    return !tree->modules[m].ignored && tree->modules[m].same_as == m;
}

static void choose(fc_wrap_targets *targets, uint32_t m) {
    targets->chosen[m] = true;
    targets->options[m] = targets->root;
}

void fc_wrap_by_class(fc_wrap_targets *targets, const char *const *classes) {
    for (uint32_t m = 0; m < targets->tree->nmodules; m++) {
        if (is_considered(targets->tree, m) && fc_module_is_instance(&targets->tree->modules[m], classes)) {
            choose(targets, m);
        }
    }
}

static void override(fc_unit_options *options, unsigned set, const fc_unit_options *with) {
    options->strategy = set & FC_UNIT_SET_STRATEGY ? with->strategy : options->strategy;
    options->prefetch = set & FC_UNIT_SET_PREFETCH ? with->prefetch : options->prefetch;
    options->use_orig_params = set & FC_UNIT_SET_USE_ORIG_PARAMS ? with->use_orig_params : options->use_orig_params;
    options->cpu_offload = set & FC_UNIT_SET_CPU_OFFLOAD ? with->cpu_offload : options->cpu_offload;
    options->forward_prefetch = set & FC_UNIT_SET_FORWARD_PREFETCH ? with->forward_prefetch : options->forward_prefetch;
    if (set & FC_UNIT_SET_MIXED_PRECISION) {
        options->mixed_precision = with->mixed_precision;
        options->param_dtype = with->param_dtype;
        options->reduce_dtype = with->reduce_dtype;
        options->buffer_dtype = with->buffer_dtype;
        options->keep_low_precision_grads = with->keep_low_precision_grads;
        options->cast_forward_inputs = with->cast_forward_inputs;
        options->no_cast_root_forward_inputs = with->no_cast_root_forward_inputs;
    }
}

fc_code fc_wrap_custom(fc_wrap_targets *targets, fc_wrap_fn fn, void *user, fc_error *err) {
    for (uint32_t m = 0; m < targets->tree->nmodules; m++) {
        fc_wrap_choice choice = {0};
        if (is_considered(targets->tree, m)) {
            FC_TRY(fn(targets->tree, m, user, &choice, err));
        }
        if (choice.wrap) {
            choose(targets, m);
            override(&targets->options[m], choice.set, &choice.options);
        }
    }
    return FC_OK;
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

static void size_decisions(fc_wrap_targets *targets, int64_t least, const char *const *force_leaf,
                           const char *const *exclude, const sizes *s) {
    const fc_module_tree *tree = targets->tree;
    for (uint32_t m = 0; m < tree->nmodules; m++) {
        const fc_module *module = &tree->modules[m];
        bool seen = m == 0 || (s->recursed[module->parent] && is_considered(tree, m));
        s->recursed[m] = seen && s->numel[m] >= least && !fc_module_is_instance(module, force_leaf);
    }
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
        if (s->recursed[m] && m > 0 && s->numel[m] - s->wrapped[m] >= least &&
            !fc_module_is_instance(module, exclude)) {
            choose(targets, m);
            s->wrapped[m] = s->numel[m];
        }
    }
}

fc_code fc_wrap_by_size(fc_wrap_targets *targets, int64_t least, const char *const *force_leaf,
                        const char *const *exclude, fc_error *err) {
    static const char *const leaves[] = {"MultiheadAttention", NULL}, *const excluded[] = {"ModuleList", "ModuleDict",
                                                                                           NULL};
    const fc_module_tree *tree = targets->tree;
    sizes s = {calloc(tree->nmodules, sizeof *s.numel), calloc(tree->nmodules, sizeof *s.wrapped),
               calloc(tree->nmodules, sizeof *s.recursed), calloc(tree->nparameters + 1, sizeof *s.latest),
               calloc(tree->nmodules, sizeof *s.order)};
    fc_code rc;
    FC_TRY_GOTO(s.numel && s.wrapped && s.recursed && s.latest && s.order ? count_elements(tree, s.numel, s.latest, err)
                                                                          : fc_no_memory(err, NULL),
                rc, out);
    fc_module_post_order(tree, s.order);
    size_decisions(targets, least, force_leaf ? force_leaf : leaves, exclude ? exclude : excluded, &s);
out:
    free(s.numel);
    free(s.wrapped);
    free(s.recursed);
    free(s.latest);
    free(s.order);
    return rc;
}

/* A numbered module without submodules, such as a Linear in a Sequential, is too small to be a block. */
void fc_wrap_blocks(fc_wrap_targets *targets) {
    const fc_module_tree *tree = targets->tree;
    for (uint32_t m = 1; m < tree->nmodules;) {
        uint64_t number;
        const fc_module *module = &tree->modules[m];
        bool block = fc_name_is_number(module->name, &number) && module->end > m + 1;
        if (block && is_considered(tree, m)) {
            choose(targets, m);
        }
        m = block ? module->end : m + 1;
    }
}

fc_code fc_wrap_override_mixed_precision(fc_wrap_targets *targets, const char *const *classes, fc_arena *arena,
                                         const char *const **overridden, fc_error *err) {
    const fc_module_tree *tree = targets->tree;
    const char **names = fc_arena_calloc(arena, tree->nmodules + 1, sizeof *names);
    size_t count = 0;
    if (!names) {
        return fc_no_memory(err, NULL);
    }
    for (uint32_t m = 0; m < tree->nmodules; m++) {
        const fc_module *module = &tree->modules[m];
        if (!fc_module_is_instance(module, classes)) {
            continue;
        }
        if (!is_one_of(module->classes[0], names)) {
            names[count++] = module->classes[0];
        }
        if (is_considered(tree, m)) {
            if (!targets->chosen[m]) {
                choose(targets, m);
            }
            targets->options[m].mixed_precision = false;
            targets->options[m].fp32_inputs = true;
        }
    }
    *overridden = names;
    return FC_OK;
}
