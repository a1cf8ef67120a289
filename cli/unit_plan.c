/*
 * Builds FSDP units from the command line: see unit_plan.h.
 */
#include "unit_plan.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <string.h>

/* Parses a number of elements such as "100M"; units are powers of 1000. */
static bool parse_count(const char *text, int64_t *out) {
    static const char units[] = "KMBT";
    int64_t value = 0;
    const char *s = text;
    for (; *s >= '0' && *s <= '9'; s++) {
        if (__builtin_mul_overflow(value, (int64_t)10, &value) ||
            __builtin_add_overflow(value, (int64_t)(*s - '0'), &value)) {
            return false;
        }
    }
    char letter = (char)(*s >= 'a' && *s <= 'z' ? *s - 'a' + 'A' : *s);
    const char *unit = letter ? strchr(units, letter == 'G' ? 'B' : letter) : NULL;
    for (long i = unit ? unit - units : -1; i >= 0; i--) {
        if (__builtin_mul_overflow(value, (int64_t)1000, &value)) {
            return false;
        }
    }
    *out = value;
    return s != text && value > 0 && (unit ? s[1] == '\0' : *s == '\0');
}

/* "A,B" → {"A", "B", NULL} */
static const char *const *split_names(const char *text, fc_arena *arena) {
    size_t count = 1, n = 0;
    for (const char *s = text; *s; s++) {
        count += *s == ',';
    }
    const char **names = fc_arena_calloc(arena, count + 1, sizeof *names);
    while (names && *text) {
        size_t len = strcspn(text, ",");
        if (len > 0 && !(names[n++] = fc_arena_strndup(arena, text, len))) {
            return NULL;
        }
        text += len + (text[len] == ',');
    }
    return names;
}

static fc_code check_classes(const unit_plan *c, const char *const *names, fc_error *err) {
    if (!names || !names[0]) {
        return names
                   ? fc_fail(err, FC_EUSAGE, "--policy class: needs the name of a class, as in class:LlamaDecoderLayer")
                   : fc_fail(err, FC_ENOMEM, "out of memory");
    }
    for (; *names; names++) {
        const char *const one[] = {*names, NULL};
        bool found = false;
        for (size_t m = 0; m < c->tree.nmodules && !found; m++) {
            found = fc_module_is_instance(&c->tree.modules[m], one);
        }
        if (!found) {
            return fc_fail(err, FC_EUSAGE,
                           "--policy class:%s: no module has the class %s; names do not contain classes, so give them "
                           "with --classes FILE, such as {\"layers.*\": \"%s\"}",
                           *names, *names, *names);
        }
    }
    return FC_OK;
}

static fc_code run_policy(unit_plan *c, fc_error *err) {
    const char *policy = c->o->policy ? c->o->policy : "blocks";
    if (strcmp(policy, "blocks") == 0) {
        fc_wrap_blocks(&c->targets);
        return FC_OK;
    }
    if (strncmp(policy, "size:", 5) == 0) {
        int64_t least;
        return parse_count(policy + 5, &least)
                   ? fc_wrap_by_size(&c->targets, least, NULL, NULL, err)
                   : fc_fail(err, FC_EUSAGE, "--policy %s: not a number of elements, such as size:100M", policy);
    }
    if (strncmp(policy, "class:", 6) == 0) {
        const char *const *names = split_names(policy + 6, c->arena);
        FC_TRY(check_classes(c, names, err));
        fc_wrap_by_class(&c->targets, names);
        return FC_OK;
    }
    return fc_wrap_custom(&c->targets, fc_wrap_file_fn, c->file, err);
}

static bool is_file(const char *policy) {
    return policy && strcmp(policy, "blocks") != 0 && strncmp(policy, "size:", 5) != 0 &&
           strncmp(policy, "class:", 6) != 0;
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
    if (!ignored) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
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
    fc_selection selection = {.include = c->o->include.items,
                              .exclude = c->o->exclude.items,
                              .strip_prefix = c->o->strip_prefix,
                              .rename = c->o->rename.items};
    fc_model_info info;
    FC_TRY(read_info(c, &info, err));
    if (is_file(c->o->policy)) {
        FC_TRY(fc_check_named("--policy", "policy", c->o->policy, "use blocks, size:N, class:NAME,... or a file",
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
    if (!c->warnings) {
        return fc_fail(err, FC_ENOMEM, "out of memory");
    }
    FC_TRY(fc_wrap_check_frozen(&c->targets, keep_warning, c, err));
    FC_TRY(fc_wrap_check_shared(&c->targets, err));
    return fc_wrap_units(&c->targets, c->arena, &c->units, err);
}
