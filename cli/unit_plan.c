/*
 * Builds FSDP units from the command line: see unit_plan.h.
 */
#include "unit_plan.h"

#include "source.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <string.h>

/* A class or pattern that no module has is a mistake. */
static fc_code check_term(const unit_plan *c, const fc_wrap_term *term, fc_error *err) {
    bool is_pattern;
    const char *name = fc_wrap_term_idle(&c->tree, term, &is_pattern);
    if (!name) {
        return FC_OK;
    }
    return is_pattern ? fc_fail(err, FC_EUSAGE, "--policy: no module fits the pattern %s", name)
                      : fc_fail(err, FC_EUSAGE,
                                "--policy: no module has the class %s; names do not contain classes, so give them with "
                                "--classes FILE, such as {\"layers.*\": \"%s\"}",
                                name, name);
}

/* With mixed precision, the classes that it leaves out are wrapped in the same pass: their elements do not count for
 * the modules above them. */
static fc_code run_terms(unit_plan *c, const fc_wrap_term *terms, size_t count, fc_error *err) {
    fc_wrap_term *all = fc_arena_calloc(c->arena, count + 1, sizeof *all);
    const char *const *fp32 = c->file ? fc_wrap_file_fp32_classes(c->file) : NULL;
    FC_NEED(all, err, NULL);
    for (size_t i = 0; i < count; i++) {
        FC_TRY(check_term(c, &terms[i], err));
        all[i] = terms[i];
    }
    if (fp32 && *fp32) {
        all[count++] = (fc_wrap_term){.kind = FC_WRAP_CLASS, .names = fp32};
    }
    return fc_wrap_any(&c->targets, all, count, err);
}

static fc_code run_policy(unit_plan *c, fc_error *err) {
    const char *policy = c->o->policy ? c->o->policy : "blocks";
    const fc_wrap_term *terms = NULL;
    size_t count = 0;
    if (strcmp(policy, "blocks") == 0) {
        fc_wrap_blocks(&c->targets);
        return FC_OK;
    }
    if (c->file) {
        terms = fc_wrap_file_terms(c->file, &count);
    } else {
        FC_TRY(fc_wrap_terms_parse(policy, c->arena, &terms, &count, err));
    }
    return terms ? run_terms(c, terms, count, err) : fc_wrap_custom(&c->targets, fc_wrap_file_fn, c->file, err);
}

static bool is_file(const char *policy) {
    return policy && strcmp(policy, "blocks") != 0 && !fc_wrap_is_terms(policy);
}

static void keep_warning(void *user, const char *text) {
    unit_plan *c = user;
    const char *copy = fc_arena_strndup(c->arena, text, strlen(text));
    if (copy) {
        c->warnings[c->nwarnings++] = copy; /* at most one per unit */
    }
}

/* Reads the file of --classes and adds the patterns of --ignore. */
static fc_code read_info(const unit_plan *c, fc_model_info *info, fc_error *err) {
    const fc_model_info *read = NULL;
    size_t n = 0, own = 0;
    if (c->o->classes) {
        FC_TRY(fc_model_info_load(c->o->classes, c->arena, &read, err));
    }
    *info = read ? *read : (fc_model_info){0};
    while (info->ignored && info->ignored[own]) {
        own++;
    }
    const char **ignored = fc_arena_calloc(c->arena, own + c->o->ignore.count + 1, sizeof *ignored);
    FC_NEED(ignored, err, NULL);
    for (size_t i = 0; i < own; i++) {
        ignored[n++] = info->ignored[i];
    }
    for (size_t i = 0; i < c->o->ignore.count; i++) {
        ignored[n++] = c->o->ignore.items[i];
    }
    info->ignored = ignored;
    return FC_OK;
}

/* The module tree of the selected parameters. */
static fc_code make_tree(unit_plan *c, const fc_checkpoint *model, fc_error *err) {
    fc_selection selection = source_selection(c->o);
    fc_model_info info;
    FC_TRY(read_info(c, &info, err));
    if (is_file(c->o->policy)) {
        FC_TRY(fc_check_named("--policy", "policy", c->o->policy,
                              "use blocks, always, size:N, class:NAME,..., name:PATTERN,... or a file",
                              "{\"layers.*\": true}", err));
        FC_TRY(fc_wrap_file_load(c->o->policy, c->arena, &c->file, err));
    }
    FC_TRY(fc_target_new(c->source, &selection, c->arena, &c->target, &c->selected, err));
    if (model) {
        FC_TRY(fc_order_like(model, c->arena, &c->target, err));
    }
    return fc_module_tree_of(&c->target, &info, c->arena, &c->tree, err);
}

/* All checks run before the units are built. */
fc_code unit_plan_make(unit_plan *c, const fc_checkpoint *model, fc_error *err) {
    static const fc_unit_options defaults = {
        .param_dtype = FC_OPAQUE, .reduce_dtype = FC_OPAQUE, .buffer_dtype = FC_OPAQUE};
    FC_TRY(make_tree(c, model, err));
    const fc_unit_options *root = c->file ? fc_wrap_file_root(c->file) : &defaults;
    FC_TRY(fc_wrap_targets_new(&c->tree, root, c->arena, &c->targets, err));
    FC_TRY(run_policy(c, err));
    if (c->file) {
        FC_TRY(fc_wrap_override_mixed_precision(&c->targets, fc_wrap_file_fp32_classes(c->file), c->arena,
                                                &c->overridden, err));
    }
    c->warnings = fc_arena_calloc(c->arena, c->tree.nmodules, sizeof *c->warnings);
    FC_NEED(c->warnings, err, NULL);
    FC_TRY(fc_wrap_check_frozen(&c->targets, keep_warning, c, err));
    FC_TRY(fc_wrap_check_shared(&c->targets, err));
    return fc_wrap_units(&c->targets, c->arena, &c->units, err);
}
