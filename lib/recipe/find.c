/*
 * Finds the shipped recipes that fit the names of a checkpoint.
 */
#include "fsdpckpt/recipe.h"

#include "fsdpckpt/try.h"

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

fc_code fc_recipe_find(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                       fc_recipe_matches *out, fc_error *err) {
    *out = (fc_recipe_matches){.names = ""};
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        const fc_recipe *recipe = NULL;
        bool fits = false;
        FC_TRY(try_recipe(s->name, options, target, arena, &recipe, &fits, err));
        if (fits) {
            const char *names = fc_arena_printf(arena, "%s%s'%s'", out->names, out->count ? ", " : "", s->name);
            *out = (fc_recipe_matches){recipe, s->name, names, out->count + 1};
            if (!names) {
                return fc_no_memory(err, NULL);
            }
        }
    }
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
    if (out->count > 1) {
        return fc_fail(err, FC_EUSAGE, "%s: several recipes fit the names of all its tensors: %s; choose one",
                       target->source->path, out->names);
    }
    return FC_OK;
}
