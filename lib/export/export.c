/*
 * Exports a model: chooses the recipe, and which prefix of all names belongs to the trainer, from the names; then
 * applies both.
 */
#include "export/export.h"

#include "fsdpckpt/try.h"
#include "recipe/recipe.h"
#include "weights/adapters.h"

#include <string.h>

/* The most leading components that could belong to the trainer. */
enum { MOST_COMPONENTS = 3 };

typedef struct exporter {
    const fc_export_options *options;
    fc_recipe_options how;
    fc_arena *arena;
    fc_target target;
    fc_export_report *report;
    const char *prefixes[MOST_COMPONENTS + 1]; /* the first is "" */
    size_t nprefixes;
    const fc_recipe *recipe; /* NULL: none */
    fc_error *err;
} exporter;

static const fc_recipe same_names = {.label = "of the export", .keeps_others = true};

/* ---- prefixes ---- */

static void list_prefixes(exporter *e) {
    e->prefixes[e->nprefixes++] = "";
    for (int i = 1; i <= MOST_COMPONENTS; i++) {
        const char *prefix = fc_model_prefix(&e->target, i, e->arena);
        if (!prefix) {
            return;
        }
        e->prefixes[e->nprefixes++] = prefix;
    }
}

/* The target as it would be without a prefix. */
static fc_code without(const exporter *e, const char *prefix, fc_target *out) {
    *out = e->target;
    return *prefix ? fc_model_strip(out, prefix, e->arena, e->err) : FC_OK;
}

static fc_code strip(exporter *e, const char *prefix) {
    e->report->prefix = prefix;
    return without(e, prefix, &e->target);
}

/* Whether two shapes are equal but for the number of rows, which may be padded. */
static bool same_columns(const fc_tensor *a, const fc_tensor *b) {
    return a->ndim == b->ndim &&
           (a->ndim < 2 || memcmp(a->shape + 1, b->shape + 1, (size_t)(a->ndim - 1) * sizeof *a->shape) == 0);
}

/* Finds the prefix without which most tensors are in the reference. @return how many. */
static size_t like_reference(const exporter *e, const fc_name_table *names, const char **best) {
    const fc_tensor *there = e->options->reference->weights->tensors;
    size_t most = 0;
    for (size_t p = 0; p < e->nprefixes; p++) {
        size_t count = 0, skip = strlen(e->prefixes[p]);
        for (size_t i = 0; i < e->target.ntensors; i++) {
            size_t at = fc_export_find(names, e->target.tensors[i].name + skip);
            count += at != FC_NO_NAME && same_columns(e->target.tensors[i].source, &there[at]);
        }
        if (count > most) {
            most = count;
            *best = e->prefixes[p];
        }
    }
    return most;
}

/*
 * Finds the prefix before the names of a model of transformers, if the trainer added one: "model.model.layers.0.…" and
 * "model.lm_head.weight". "model.layers.0.…" has none.
 */
static const char *before_hub_names(const exporter *e) {
    static const char *const roots[] = {"model.", "lm_head.", "transformer.", NULL};
    for (size_t p = e->nprefixes - 1; p > 0; p--) {
        size_t skip = strlen(e->prefixes[p]), i = 0;
        for (; i < e->target.ntensors; i++) {
            const char *const *root = roots;
            while (*root && strncmp(e->target.tensors[i].name + skip, *root, strlen(*root)) != 0) {
                root++;
            }
            if (!*root) {
                break;
            }
        }
        if (i == e->target.ntensors) {
            return e->prefixes[p];
        }
    }
    return "";
}

/* ---- recipes ---- */

/* A recipe that was named: the prefix is one without which it takes all tensors. */
static fc_code take_named(exporter *e) {
    FC_TRY(fc_recipe_load(e->options->recipe, &e->how, e->arena, &e->recipe, e->err));
    e->report->recipe = e->options->recipe;
    for (size_t p = 0; p < e->nprefixes; p++) {
        fc_target target;
        const fc_target_tensor *untaken = NULL;
        FC_TRY(without(e, e->prefixes[p], &target));
        FC_TRY(fc_recipe_takes_all(e->recipe, &target, &untaken, e->err));
        if (!untaken) {
            return strip(e, e->prefixes[p]);
        }
    }
    return FC_OK;
}

/* The only shipped recipe that fits, with the prefix without which it does. */
static fc_code take_fitting(exporter *e) {
    for (size_t p = 0; p < e->nprefixes && !e->recipe; p++) {
        fc_target target;
        fc_recipe_matches found;
        FC_TRY(without(e, e->prefixes[p], &target));
        FC_TRY(fc_recipe_find(&target, &e->how, e->arena, &found, e->err));
        if (found.count > 1) {
            return fc_recipe_several(&target, &e->how, &found, e->err);
        }
        if (found.count == 1) {
            e->recipe = found.recipe;
            e->report->recipe = found.name;
            e->report->found = found;
            FC_TRY(strip(e, e->prefixes[p]));
        }
    }
    return FC_OK;
}

static bool recipe_is(const exporter *e, const char *word) {
    return e->options->recipe && strcmp(e->options->recipe, word) == 0;
}

/* Without a recipe: the prefix without which names are those of the reference, or of transformers. Sets `*fits` to
   whether all tensors of one side are those of the other one. */
static fc_code take_names(exporter *e, const char **prefix, bool *fits) {
    const fc_export_reference *reference = e->options->reference;
    *prefix = before_hub_names(e);
    *fits = false;
    if (!reference || !reference->weights) {
        return FC_OK;
    }
    const fc_name_table *names = fc_export_names(reference->weights, e->arena);
    FC_NEED(names, e->err, e->target.source->path);
    size_t alike = like_reference(e, names, prefix);
    *fits = alike == e->target.ntensors || alike == reference->weights->ntensors;
    return FC_OK;
}

static fc_code choose(exporter *e) {
    const char *prefix;
    bool fits;
    if (e->options->recipe && !recipe_is(e, "auto") && !recipe_is(e, "none")) {
        return take_named(e);
    }
    FC_TRY(take_names(e, &prefix, &fits));
    if (!recipe_is(e, "none") && !fits) {
        FC_TRY(take_fitting(e));
    }
    if (recipe_is(e, "auto") && !fits && !e->recipe) {
        return fc_fail(e->err, FC_EUSAGE, "%s: no shipped recipe fits the names of all its tensors, such as '%s'",
                       e->target.source->path, e->target.tensors[0].name);
    }
    return e->recipe ? FC_OK : strip(e, prefix);
}

/* ---- adapters inside the model ---- */

/* @return the first name of a checkpoint that an adapter inside a model has, or NULL. */
static const char *find_adapter_name(const fc_checkpoint *c) {
    for (size_t i = 0; i < c->ntensors; i++) {
        if (fc_is_adapter_name(c->tensors[i].name)) {
            return c->tensors[i].name;
        }
    }
    return NULL;
}

/* Whether the names of the reference are those of a model with an adapter, as some on the hub have. */
static bool reference_has_adapter(const exporter *e) {
    const fc_export_reference *reference = e->options->reference;
    return reference && reference->weights && find_adapter_name(reference->weights);
}

static fc_code refuse_adapter(const exporter *e, const char *name) {
    fc_code rc =
        fc_fail(e->err, FC_EUSAGE,
                "%s: tensor %.256s belongs to a LoRA adapter inside the model, and transformers would not load "
                "it",
                e->target.source->path, name);
    return fc_advise(e->err, rc, FC_HINT_ADAPTER_CONFIG, NULL);
}

/* @return the first name that an adapter inside the model has, or NULL. */
static const char *adapter_name(const fc_target *target) {
    for (size_t i = 0; i < target->ntensors; i++) {
        if (fc_is_adapter_name(target->tensors[i].name)) {
            return target->tensors[i].name;
        }
    }
    return NULL;
}

/* Replaces the source by the model that its adapter is merged into. */
static fc_code merge_adapter(exporter *e, fc_checkpoint **source) {
    static const fc_selection all = {.include = NULL};
    fc_checkpoint *made = NULL;
    fc_selected counts;
    FC_TRY(fc_recipe_apply(*source, &e->target, &same_names, &made, e->err));
    *source = made;
    FC_TRY(fc_merge_own_adapter(*source, e->options->adapter_config, &made, &e->report->merged, e->err));
    *source = made;
    return fc_target_new(*source, &all, e->arena, &e->target, &counts, e->err);
}

/* A recipe that was named may be for the names of adapters; the names that it makes are checked. */
static fc_code handle_adapter(exporter *e, fc_checkpoint **source) {
    const char *name = adapter_name(&e->target);
    if (!name && (!e->options->adapter_config || e->options->adapter_optional)) {
        return FC_OK;
    }
    if (e->options->adapter_config) {
        return name ? merge_adapter(e, source)
                    : fc_fail(e->err, FC_EUSAGE, "%s: the model has no LoRA adapter inside that could be merged",
                              (*source)->path);
    }
    const bool named = e->options->recipe && !recipe_is(e, "auto") && !recipe_is(e, "none");
    return !named && !reference_has_adapter(e) ? refuse_adapter(e, name) : FC_OK;
}

static fc_code check_no_adapter(const exporter *e, const fc_checkpoint *made) {
    const char *name = find_adapter_name(made);
    return name && !reference_has_adapter(e) ? refuse_adapter(e, name) : FC_OK;
}

/* ---- all of it ---- */

/* Makes the checkpoint of the model that e->target lists, unless it is the whole source. */
static fc_code apply_model(const exporter *e, fc_checkpoint **source) {
    static const fc_recipe model = {.label = "of the model", .keeps_others = true, .keeps_mesh = true};
    const fc_model_place *place = &e->report->place;
    fc_checkpoint *made = NULL;
    if (place->left_out == 0 && !*place->branch && !*place->wrappers && !*e->report->prefix) {
        return FC_OK;
    }
    FC_TRY(fc_recipe_apply(*source, &e->target, &model, &made, e->err));
    *source = made;
    return FC_OK;
}

fc_code fc_model_only(fc_checkpoint **source, fc_arena *arena, fc_model_place *place, fc_error *err) {
    static const fc_selection everything = {0};
    fc_export_report report = {.prefix = ""};
    exporter e = {.arena = arena, .report = &report, .err = err};
    fc_selected counts;
    FC_TRY(fc_target_new(*source, &everything, arena, &e.target, &counts, err));
    FC_TRY(fc_model_find(&e.target, arena, &report.place, err));
    list_prefixes(&e);
    FC_TRY(strip(&e, before_hub_names(&e)));
    *place = report.place;
    return apply_model(&e, source);
}

fc_code fc_export_open(fc_checkpoint **source, const fc_export_options *options, fc_arena *arena, fc_export_report *out,
                       fc_error *err) {
    exporter e = {.options = options,
                  .how = {.reverse = options->reverse, .config = options->config},
                  .arena = arena,
                  .report = out,
                  .err = err};
    fc_selected counts;
    fc_checkpoint *made = NULL;
    *out = (fc_export_report){.prefix = ""};
    FC_TRY(fc_target_new(*source, options->selection, arena, &e.target, &counts, err));
    FC_TRY(fc_model_find(&e.target, arena, &out->place, err));
    out->place.left_out += counts.left_out;
    FC_TRY(handle_adapter(&e, source));
    list_prefixes(&e);
    FC_TRY(choose(&e));
    FC_TRY(fc_recipe_apply(*source, &e.target, e.recipe ? e.recipe : &same_names, &made, err));
    *source = made;
    FC_TRY(check_no_adapter(&e, made));
    return options->reference ? fc_export_fit(source, options->reference, arena, &out->fit, err) : FC_OK;
}
