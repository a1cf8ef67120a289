/*
 * Finds the shipped recipes that fit the names of a checkpoint.
 */
#include "fsdpckpt/try.h"
#include "recipe/recipe.h"

#include <ctype.h>
#include <string.h>

/* Sets `*fits` to whether the recipe has rules for all tensors in one direction, and not in the other one. */
static fc_code try_recipe(const char *name, const fc_recipe_options *options, const fc_target *target, fc_arena *arena,
                          const fc_recipe **recipe, bool *fits, fc_error *err) {
    const fc_recipe_options back = {.reverse = !options->reverse, .config = options->config};
    const fc_recipe *reversed = NULL;
    bool also = false;
    FC_TRY(fc_recipe_load(name, options, arena, recipe, err));
    FC_TRY(fc_recipe_takes_all(*recipe, target, fits, err));
    if (*fits) {
        FC_TRY(fc_recipe_load(name, &back, arena, &reversed, err));
        FC_TRY(fc_recipe_takes_all(reversed, target, &also, err));
    }
    *fits = *fits && !also;
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

static bool is_for(const fc_recipe *recipe, const char *model) {
    for (const char *const *m = recipe->models; m && *m; m++) {
        if (same_model(*m, model)) {
            return true;
        }
    }
    return false;
}

/* Adds a recipe. */
static fc_code add(fc_recipe_matches *m, const fc_recipe *recipe, const char *name, fc_arena *arena, fc_error *err) {
    const char *names = fc_arena_printf(arena, "%s%s'%s'", m->names, m->count ? ", " : "", name);
    m->recipe = recipe;
    m->name = name;
    m->names = names;
    m->count++;
    return names ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_recipe_find(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                       fc_recipe_matches *out, fc_error *err) {
    fc_recipe_matches all = {.names = ""}, some = {.names = ""};
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        const fc_recipe *recipe = NULL;
        bool fits = false;
        FC_TRY(try_recipe(s->name, options, target, arena, &recipe, &fits, err));
        const char *model = recipe->config ? recipe->config->model : NULL;
        FC_TRY(fits ? add(&all, recipe, s->name, arena, err) : FC_OK);
        if (fits && model && is_for(recipe, model)) {
            some.model = model;
            FC_TRY(add(&some, recipe, s->name, arena, err));
        }
    }
    *out = all.count > 1 && some.count > 0 ? some : all;
    return FC_OK;
}

fc_code fc_recipe_find_only(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                            fc_recipe_matches *out, fc_error *err) {
    FC_TRY(fc_recipe_find(target, options, arena, out, err));
    if (out->count == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: no shipped recipe fits the names of all its tensors in this direction%s only; "
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
