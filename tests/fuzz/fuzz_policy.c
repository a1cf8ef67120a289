/*
 * Fuzzes the files of a wrap policy and of module classes: the first byte says which. If one loads, it is applied to a
 * module tree, and each parameter is in one unit.
 */
#include "fsdpckpt/wrap_policy.h"

#include "fuzz.h"

static void check_units(const fc_wrap_targets *targets, const fc_module_tree *tree, fc_arena *arena) {
    fc_error err;
    fc_units units;
    uint32_t *unit = fc_arena_calloc(arena, tree->nmodules + 1, sizeof *unit);
    fc_wrap_unit_of(targets, unit);
    for (size_t i = 0; i < tree->nmodules; i++) {
        if (unit[i] >= tree->nmodules) {
            abort();
        }
    }
    (void)fc_wrap_check_frozen(targets, NULL, NULL, &err);
    (void)fc_wrap_check_shared(targets, &err);
    (void)fc_wrap_units(targets, arena, &units, &err);
}

static void apply_policy(fc_wrap_file *file, const fc_module_tree *tree, fc_arena *arena) {
    fc_error err;
    fc_wrap_targets targets;
    const char *const *overridden;
    const char *idle;
    size_t count;
    const fc_wrap_term *terms = fc_wrap_file_terms(file, &count);
    if (fc_wrap_targets_new(tree, fc_wrap_file_root(file), arena, &targets, &err) == FC_OK &&
        (terms ? fc_wrap_any(&targets, terms, count, &err) : fc_wrap_custom(&targets, fc_wrap_file_fn, file, &err)) ==
            FC_OK &&
        fc_wrap_override_mixed_precision(&targets, fc_wrap_file_fp32_classes(file), arena, &overridden, &err) ==
            FC_OK) {
        check_units(&targets, tree, arena);
    }
    (void)fc_wrap_file_idle(file, &idle);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int64_t shape[] = {4, 6};
    fc_parameter_spec specs[FUZZ_NAMES];
    fc_module_tree tree;
    fc_error err;
    if (size == 0) {
        return 0;
    }
    memset(specs, 0, sizeof specs);
    for (int i = 0; i < FUZZ_NAMES; i++) {
        specs[i].fqn = fuzz_names[i];
        specs[i].dtype = FC_F32;
        specs[i].ndim = 2;
        specs[i].shape = shape;
    }
    fc_arena *arena = fc_arena_new();
    const fc_model_info *info = NULL;
    fc_wrap_file *file = NULL;
    const char *path = fuzz_file(data + 1, size - 1);
    const fc_code rc =
        data[0] % 2 ? fc_model_info_load(path, arena, &info, &err) : fc_wrap_file_load(path, arena, &file, &err);
    if (rc == FC_OK && fc_module_tree_new(specs, FUZZ_NAMES, info, arena, &tree, &err) == FC_OK && file) {
        apply_policy(file, &tree, arena);
    }
    fc_arena_free(arena);
    return 0;
}
