/*
 * Policies: choose the modules of a tree that become FSDP units, and their options. Nothing is applied here, so a
 * policy can walk the tree as often as it likes; wrap_apply.c applies the result in one pass.
 */
#include "fsdpckpt/wrap_policy.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "wrap/module_tree.h"

bool fc_module_is_instance(const fc_module *m, const char *const *classes) {
    for (size_t i = 0; i < m->nclasses; i++) {
        if (fc_has_text(classes, m->classes[i])) {
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
    FC_NEED(names, err, NULL);
    for (uint32_t m = 0; m < tree->nmodules; m++) {
        const fc_module *module = &tree->modules[m];
        if (!fc_module_is_instance(module, classes)) {
            continue;
        }
        if (!fc_has_text(names, module->classes[0])) {
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
