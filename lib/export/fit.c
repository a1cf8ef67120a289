/*
 * Fits a model to a reference: finds the tensors that are tied there, or stored twice, and the embeddings with more
 * rows than its vocabulary, changes them by a recipe that is made for the purpose, and compares the result.
 */
#include "export/fit.h"

#include "fsdpckpt/check.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

/* ---- lists in the arena ---- */

/* Appends a change to a list in the arena, which has at most one change for each tensor of `of`. */
static fc_code add_change(const fc_fit *f, fc_export_change **list, size_t *count, const fc_checkpoint *of,
                          const fc_export_change *change) {
    *list = *list ? *list : fc_arena_calloc(f->arena, of->ntensors, sizeof **list);
    FC_NEED(*list, f->err, f->model->path);
    (*list)[(*count)++] = *change;
    return FC_OK;
}

/* Returns an array of two texts in the arena, or NULL. */
static const char **pair(const fc_fit *f, const char *first, const char *second) {
    const char **both = fc_arena_calloc(f->arena, 3, sizeof *both);
    if (both) {
        both[0] = first;
        both[1] = second;
    }
    return both;
}

/* ---- ties ---- */

fc_code fc_fit_twin(fc_fit *f, const fc_export_shapes *shapes, const fc_tensor *t, bool drop) {
    const fc_tensor *twin = NULL;
    FC_TRY(fc_export_find_twin(shapes, t, &twin, f->err));
    if (!twin) {
        return FC_OK;
    }
    const char **names = drop ? pair(f, t->name, NULL) : pair(f, twin->name, t->name);
    FC_NEED(names, f->err, f->model->path);
    const fc_export_change change = {.name = t->name, .other = twin->name};
    f->rules[f->nrules++] = drop ? (fc_recipe_rule){.kind = FC_RULE_DROP, .from = names, .nfrom = 1}
                                 : (fc_recipe_rule){.kind = FC_RULE_ADD, .to = names, .nto = 2};
    return drop ? add_change(f, &f->report->tied, &f->report->ntied, f->model, &change)
                : add_change(f, &f->report->copied, &f->report->ncopied, f->reference->weights, &change);
}

static fc_code find_ties(fc_fit *f) {
    const fc_checkpoint *model = f->model, *reference = f->reference->weights;
    const fc_export_shapes *known = fc_export_shapes_new(model, f->there, f->arena);
    const fc_export_shapes *wanted = fc_export_shapes_new(reference, f->here, f->arena);
    FC_NEED(known && wanted, f->err, f->model->path);
    for (size_t i = 0; i < model->ntensors; i++) {
        const fc_tensor *t = &model->tensors[i];
        FC_TRY(t->object || fc_export_find(f->there, t->name) != FC_NO_NAME ? FC_OK : fc_fit_twin(f, known, t, true));
    }
    for (size_t i = 0; i < reference->ntensors; i++) {
        const fc_tensor *t = &reference->tensors[i];
        FC_TRY(t->object || fc_export_find(f->here, t->name) != FC_NO_NAME ? FC_OK : fc_fit_twin(f, wanted, t, false));
    }
    return FC_OK;
}

/* ---- the vocabulary ---- */

/* Whether only the first dimension differs, and the reference's is the vocabulary. */
static bool is_padded(const fc_fit *f, const fc_tensor *t, const fc_tensor *like) {
    return f->facts.vocabulary > 0 && t->ndim == like->ndim && t->ndim > 0 && like->shape[0] == f->facts.vocabulary &&
           t->shape[0] > like->shape[0] &&
           memcmp(t->shape + 1, like->shape + 1, (size_t)(t->ndim - 1) * sizeof *t->shape) == 0;
}

fc_code fc_fit_rows(fc_fit *f, const fc_tensor *t, int64_t rows) {
    fc_recipe_op *op = fc_arena_calloc(f->arena, 1, sizeof *op);
    const char **name = pair(f, t->name, NULL);
    const char *before = fc_arena_printf(f->arena, "%" PRId64, t->shape[0]);
    const char *after = fc_arena_printf(f->arena, "%" PRId64, rows);
    FC_NEED(op && name && before && after, f->err, f->model->path);
    *op = (fc_recipe_op){.kind = FC_OP_RESIZE, .left = before, .right = after};
    f->rules[f->nrules++] = (fc_recipe_rule){.from = name, .to = name, .nfrom = 1, .nto = 1, .ops = op, .nops = 1};
    const fc_export_change change = {.name = t->name, .from = t->shape[0], .to = rows};
    return add_change(f, &f->report->trimmed, &f->report->ntrimmed, f->model, &change);
}

static fc_code find_padded(fc_fit *f) {
    for (size_t i = 0; i < f->model->ntensors; i++) {
        const fc_tensor *t = &f->model->tensors[i];
        size_t at = t->object ? FC_NO_NAME : fc_export_find(f->there, t->name);
        if (at != FC_NO_NAME && is_padded(f, t, &f->reference->weights->tensors[at])) {
            FC_TRY(fc_fit_rows(f, t, f->facts.vocabulary));
        }
    }
    return FC_OK;
}

/* ---- applying it ---- */

static fc_code apply(fc_fit *f, fc_checkpoint **model) {
    const fc_recipe recipe = {
        .label = "for the reference", .rules = f->rules, .nrules = f->nrules, .keeps_others = true};
    const fc_selection all = {0};
    fc_target target;
    fc_selected counts;
    fc_checkpoint *made = NULL;
    if (f->nrules == 0) {
        return FC_OK;
    }
    FC_TRY(fc_target_new(*model, &all, f->arena, &target, &counts, f->err));
    FC_TRY(fc_recipe_apply(*model, &target, &recipe, &made, f->err));
    *model = made;
    return FC_OK;
}

/* ---- what remains different ---- */

/* Differences of dtype are compared here, because a cast removes most of them. */
static bool about_dtypes(fc_finding_kind kind) {
    return kind == FC_FOUND_DTYPE || kind == FC_FOUND_DTYPE_MIXED || kind == FC_FOUND_DTYPE_OTHER;
}

static fc_code compare_dtypes(const fc_fit *f, const fc_checkpoint *model, const char **lines, size_t *count) {
    for (size_t i = 0; i < model->ntensors; i++) {
        const fc_tensor *t = &model->tensors[i];
        size_t at = t->object ? FC_NO_NAME : fc_export_find(f->there, t->name);
        const fc_tensor *like = at == FC_NO_NAME ? t : &f->reference->weights->tensors[at];
        if (like->dtype == t->dtype) {
            continue;
        }
        if (fc_export_casts(t->dtype, like->dtype)) {
            f->report->cast++;
            continue;
        }
        lines[*count] = fc_arena_printf(
            f->arena, "%s is %s, and %s in the reference; only floating-point types of at least 16 bits are converted",
            t->name, fc_dtype_get(t->dtype)->torch_name, fc_dtype_get(like->dtype)->torch_name);
        FC_NEED(lines[(*count)++], f->err, f->model->path);
    }
    return FC_OK;
}

/* Names and shapes: the findings of a check, which pairs names that are alike. */
static fc_code compare(fc_fit *f, const fc_checkpoint *model) {
    const fc_check_options how = {.reference = f->reference->weights, .setting_names = f->reference->setting_names};
    fc_report report;
    FC_TRY(fc_check(model, &how, f->arena, &report, f->err));
    const char **lines = fc_arena_calloc(f->arena, report.count + model->ntensors + 1, sizeof *lines);
    FC_NEED(lines, f->err, f->model->path);
    f->report->differences = lines;
    for (size_t i = 0; i < report.count; i++) {
        const fc_finding *found = &report.findings[i];
        if (fc_finding_info_get(found->kind)->severity == FC_SEVERITY_ERROR && !about_dtypes(found->kind)) {
            lines[f->report->ndifferences++] = found->message;
        }
    }
    return compare_dtypes(f, model, lines, &f->report->ndifferences);
}

/* With the weights of the reference: what differs from them. */
static fc_code fit_weights(fc_fit *f, fc_checkpoint **model) {
    f->there = fc_export_names(f->reference->weights, f->arena);
    FC_NEED(f->there, f->err, f->model->path);
    FC_TRY(find_ties(f));
    FC_TRY(find_padded(f));
    FC_TRY(apply(f, model));
    return compare(f, *model);
}

fc_code fc_export_fit(fc_checkpoint **model, const fc_export_reference *reference, fc_arena *arena,
                      fc_export_fit_report *out, fc_error *err) {
    fc_fit f = {.model = *model, .reference = reference, .arena = arena, .report = out, .err = err};
    const fc_checkpoint *weights = reference->weights;
    *out = (fc_export_fit_report){0};
    f.here = fc_export_names(*model, arena);
    f.rules = fc_arena_calloc(arena, 2 * f.model->ntensors + (weights ? weights->ntensors : 0) + 1, sizeof *f.rules);
    FC_NEED(f.here && f.rules, err, f.model->path);
    FC_TRY(fc_fit_read_config(&f));
    if (weights) {
        return fit_weights(&f, model);
    }
    FC_TRY(fc_fit_config(&f));
    return apply(&f, model);
}
