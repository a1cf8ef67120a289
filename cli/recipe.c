/*
 * --recipe, --reverse and --config: see recipe.h.
 */
#include "recipe.h"

#include "source.h"

#include "fsdpckpt/recipe.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

fc_code recipe_check_options(const options *o, fc_error *err) {
    if (!o->recipe && o->reverse) {
        return fc_fail(err, FC_EUSAGE, "--reverse needs --recipe");
    }
    return !o->recipe && !option_given(o, OPT_DEQUANTIZE) && o->config
               ? fc_fail(err, FC_EUSAGE, "--config needs --recipe or --dequantize")
               : FC_OK;
}

/*
 * Sets `*fits` to whether a shipped recipe has rules for all tensors, in this direction only: where both sides have the
 * same names, the names do not tell which side it is.
 */
static fc_code try_recipe(const char *name, const fc_recipe_options *how, const fc_target *target, fc_arena *arena,
                          const fc_recipe **recipe, bool *fits, fc_error *err) {
    const fc_recipe_options back = {.reverse = !how->reverse, .config = how->config};
    const fc_recipe *reversed = NULL;
    bool also = false;
    FC_TRY(fc_recipe_load(name, how, arena, recipe, err));
    FC_TRY(fc_recipe_takes_all(*recipe, target, fits, err));
    FC_TRY(fc_recipe_load(name, &back, arena, &reversed, err));
    FC_TRY(fc_recipe_takes_all(reversed, target, &also, err));
    *fits = *fits && !also;
    return FC_OK;
}

/* --recipe auto: the only shipped recipe that fits. */
static fc_code find_recipe(const options *o, const fc_recipe_options *how, const fc_target *target, fc_arena *arena,
                           const fc_recipe **out, fc_error *err) {
    char found[512] = "";
    size_t count = 0;
    const char *only = NULL;
    for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
        const fc_recipe *recipe = NULL;
        bool fits = false;
        FC_TRY(try_recipe(s->name, how, target, arena, &recipe, &fits, err));
        if (fits) {
            size_t used = strlen(found);
            snprintf(found + used, sizeof found - used, "%s'%s'", count++ ? ", " : "", s->name);
            only = s->name;
            *out = recipe;
        }
    }
    if (count == 1) {
        if (!o->quiet) {
            text_report("%s: the recipe is %s", target->source->path, only);
        }
        return FC_OK;
    }
    return count == 0 ? fc_fail(err, FC_EUSAGE,
                                "%s: no shipped recipe fits the names of all its tensors in this direction%s only; "
                                "'fsdpckpt recipes' lists them",
                                target->source->path, how->reverse ? " (reversed)" : "")
                      : fc_fail(err, FC_EUSAGE, "%s: several recipes fit the names of all its tensors: %s; choose one",
                                target->source->path, found);
}

static fc_code apply(const options *o, const fc_selection *selection, fc_arena *arena, fc_checkpoint **source,
                     size_t *left_out, fc_error *err) {
    const fc_selection some = {.include = selection->include,
                               .exclude = selection->exclude,
                               .strip_prefix = selection->strip_prefix,
                               .rename = selection->rename};
    fc_recipe_options how = {.reverse = o->reverse};
    const fc_recipe *recipe = NULL;
    fc_checkpoint *made = NULL;
    fc_target target;
    fc_selected counts;
    FC_TRY(source_config(o, *source, arena, &how.config, err));
    FC_TRY(fc_target_new(*source, &some, arena, &target, &counts, err));
    FC_TRY(strcmp(o->recipe, "auto") == 0 ? find_recipe(o, &how, &target, arena, &recipe, err)
                                          : fc_recipe_load(o->recipe, &how, arena, &recipe, err));
    FC_TRY(fc_recipe_apply(*source, &target, recipe, &made, err));
    *source = made;
    *left_out = counts.left_out;
    return FC_OK;
}

fc_code recipe_apply(const options *o, const fc_selection *selection, fc_checkpoint **source, size_t *left_out,
                     fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_code rc = arena ? apply(o, selection, arena, source, left_out, err) : fc_no_memory(err, NULL);
    fc_arena_free(arena);
    return rc;
}
