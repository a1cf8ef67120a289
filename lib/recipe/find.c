/*
 * Finds the shipped recipes that fit the names of a checkpoint.
 */
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"

#include <ctype.h>
#include <string.h>

/* A shipped recipe that was tried. */
typedef struct tried {
    const fc_recipe *recipe;
    const fc_target_tensor *untaken; /* a tensor for which it has no rule, or NULL */
} tried;

/* Sets `*fits` to whether the recipe has rules for all tensors in one direction, and not in the other one. */
static fc_code try_recipe(const char *name, const fc_recipe_options *options, const fc_target *target, fc_arena *arena,
                          tried *t, bool *fits, fc_error *err) {
    const fc_recipe_options back = {.reverse = !options->reverse, .config = options->config};
    const fc_recipe *reversed = NULL;
    const fc_target_tensor *untaken = NULL;
    FC_TRY(fc_recipe_load(name, options, arena, &t->recipe, err));
    FC_TRY(fc_recipe_takes_all(t->recipe, target, &t->untaken, err));
    if (!t->untaken) {
        FC_TRY(fc_recipe_load(name, &back, arena, &reversed, err));
        FC_TRY(fc_recipe_takes_all(reversed, target, &untaken, err));
    }
    *fits = !t->untaken && untaken;
    return FC_OK;
}

/* Whether two names of a model are the same but for case and underscores: "qwen3_moe", "Qwen3MoeForCausalLM". */
static bool same_model(const char *a, const char *b) {
    for (; *a; a++) {
        if (*a == '_') {
            continue;
        }
        b += *b == '_';
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b)) {
            return false;
        }
        b++;
    }
    return !*b || strcmp(b, "ForCausalLM") == 0 || strcmp(b, "LMHeadModel") == 0 ||
           strcmp(b, "ForConditionalGeneration") == 0;
}

bool fc_recipe_is_for(const fc_recipe *recipe, const char *model) {
    for (const char *const *m = recipe->models; m && *m; m++) {
        if (same_model(*m, model)) {
            return true;
        }
    }
    return false;
}

/* Adds a recipe. */
static fc_code add_match(fc_recipe_matches *m, const fc_recipe *recipe, const char *name, fc_arena *arena,
                         fc_error *err) {
    const char *names = fc_arena_printf(arena, "%s%s'%s'", m->names, m->count ? ", " : "", name);
    m->recipe = recipe;
    m->name = name;
    m->names = names;
    m->count++;
    return names ? FC_OK : fc_no_memory(err, NULL);
}

/* Whether one of the recipes but `fitting` has a rule for a tensor. */
static fc_code others_take(const tried *all, size_t count, const fc_recipe *fitting, const fc_target *target,
                           const fc_target_tensor *tensor, bool *taken, fc_error *err) {
    fc_target_tensor copy = *tensor;
    fc_target alone = *target;
    alone.tensors = &copy;
    alone.ntensors = 1;
    *taken = false;
    for (size_t i = 0; i < count && !*taken; i++) {
        const fc_target_tensor *untaken = tensor;
        if (all[i].recipe != fitting && all[i].untaken != tensor) {
            FC_TRY(fc_recipe_takes_all(all[i].recipe, &alone, &untaken, err));
        }
        *taken = !untaken;
    }
    return FC_OK;
}

/* Finds a tensor that only the match takes, among the first tensors that each other recipe does not take. */
static fc_code find_deciding(const tried *all, size_t count, const fc_target *target, fc_recipe_matches *m,
                             fc_error *err) {
    for (size_t i = 0; i < count && !m->tensor; i++) {
        bool taken = true;
        if (all[i].untaken) {
            FC_TRY(others_take(all, count, m->recipe, target, all[i].untaken, &taken, err));
        }
        m->tensor = taken ? NULL : all[i].untaken->name;
    }
    return FC_OK;
}

static size_t count_shipped(void) {
    size_t count = 0;
    while (fc_shipped_recipes[count].name) {
        count++;
    }
    return count;
}

fc_code fc_recipe_find(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                       fc_recipe_matches *out, fc_error *err) {
    fc_recipe_matches all = {.names = ""}, some = {.names = ""};
    const size_t count = count_shipped();
    tried *t = fc_arena_calloc(arena, count + 1, sizeof *t);
    FC_NEED(t, err, NULL);
    for (size_t i = 0; i < count; i++) {
        const char *name = fc_shipped_recipes[i].name;
        bool fits = false;
        FC_TRY(try_recipe(name, options, target, arena, &t[i], &fits, err));
        const fc_recipe_config *config = t[i].recipe->config;
        FC_TRY(fits ? add_match(&all, t[i].recipe, name, arena, err) : FC_OK);
        if (fits && config && config->model && fc_recipe_is_for(t[i].recipe, config->model)) {
            some.model = config->model;
            some.model_key = config->model_key;
            FC_TRY(add_match(&some, t[i].recipe, name, arena, err));
        }
    }
    *out = all.count > 1 && some.count > 0 ? some : all;
    return all.count == 1 ? find_deciding(t, count, target, out, err) : FC_OK;
}

fc_code fc_recipe_find_only(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                            fc_recipe_matches *out, fc_error *err) {
    FC_TRY(fc_recipe_find(target, options, arena, out, err));
    if (out->count == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: no shipped recipe fits the names of all its tensors only in this direction%s; "
                       "'fsdpckpt recipes' lists them",
                       target->source->path, options->reverse ? " (reversed)" : "");
    }
    return out->count == 1 ? FC_OK : fc_recipe_several(target, options, out, err);
}

fc_code fc_recipe_several(const fc_target *target, const fc_recipe_options *options, const fc_recipe_matches *found,
                          fc_error *err) {
    fc_code rc = fc_fail(err, FC_EUSAGE, "%s: several recipes fit the names of all its tensors%s%s%s: %s",
                         target->source->path, found->model ? " and the model '" : "", found->model ? found->model : "",
                         found->model ? "'" : "", found->names);
    return fc_advise(err, rc, options->config ? FC_HINT_RECIPE : FC_HINT_RECIPE_CONFIG, NULL);
}
