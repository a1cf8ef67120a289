/*
 * --recipe, --reverse and --config: see recipe.h.
 */
#include "recipe.h"

#include "ranks.h"
#include "source.h"
#include "weights.h"

#include "fsdpckpt/recipe.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

fc_code recipe_check_options(const options *o, fc_error *err) {
    if (!o->recipe && o->reverse) {
        return fc_fail(err, FC_EUSAGE, "--reverse needs --recipe");
    }
    if (o->delta.count == 0 && option_given(o, OPT_UP_TO)) {
        return fc_fail(err, FC_EUSAGE, "--up-to needs --delta with a directory of versions");
    }
    return !o->recipe && !option_given(o, OPT_DEQUANTIZE) && o->config
               ? fc_fail(err, FC_EUSAGE, "--config needs --recipe, or --dequantize where the command takes it")
               : FC_OK;
}

const char *recipe_reason(const fc_recipe_matches *found, fc_arena *arena) {
    if (found->model) {
        return fc_arena_printf(arena, "because %s of config.json is '%s'", found->model_key, found->model);
    }
    return found->tensor ? fc_arena_printf(arena, "the only one with a rule for '%s'", found->tensor)
                         : "the only one with a rule for every tensor";
}

/* --recipe auto: the only shipped recipe that fits. */
static fc_code find_recipe(const options *o, const fc_recipe_options *how, const fc_target *target, fc_arena *arena,
                           const fc_recipe **out, fc_error *err) {
    fc_recipe_matches found;
    FC_TRY(fc_recipe_find_only(target, how, arena, &found, err));
    const char *reason = recipe_reason(&found, arena);
    FC_NEED(reason, err, NULL);
    if (!o->quiet && ranks_is_launched_first()) {
        text_report("%s: the recipe is %s, %s", target->source->path, found.name, reason);
    }
    *out = found.recipe;
    return FC_OK;
}

static fc_code apply_selected(const options *o, const fc_selection *selection, bool headers_only, fc_arena *arena,
                              fc_checkpoint **source, size_t *left_out, fc_error *err) {
    const fc_selection some = {.include = selection->include,
                               .exclude = selection->exclude,
                               .strip_prefix = selection->strip_prefix,
                               .rename = selection->rename};
    fc_recipe_options how = {.reverse = o->reverse, .headers_only = headers_only};
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

fc_code recipe_apply(const options *o, const fc_selection *selection, bool headers_only, fc_checkpoint **source,
                     size_t *left_out, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_code rc =
        arena ? apply_selected(o, selection, headers_only, arena, source, left_out, err) : fc_no_memory(err, NULL);
    fc_arena_free(arena);
    return rc;
}

static fc_code change_source(const options *o, bool headers_only, fc_checkpoint **source, fc_error *err) {
    const fc_selection selection = source_selection(o);
    size_t left_out = 0;
    FC_TRY(weights_compute(o, source, err));
    FC_TRY(o->recipe ? recipe_apply(o, &selection, headers_only, source, &left_out, err) : FC_OK);
    return weights_quantize(o, source, err);
}

bool recipe_changes(const options *o) {
    return (o->given & (TAKES(OPT_DELTA) | TAKES(OPT_RECIPE) | TAKES(OPT_DEQUANTIZE) | TAKES(OPT_QUANTIZE) |
                        TAKES(OPT_ADAPTER))) != 0;
}

fc_code recipe_open(cli_call *call, options *rest, const char *path, bool headers_only, fc_checkpoint **out,
                    fc_error *err) {
    const options *o = call->options;
    *out = NULL;
    FC_TRY(recipe_check_options(o, err));
    FC_TRY(source_open(call, path, headers_only, out, err));
    fc_code rc = change_source(o, headers_only, out, err);
    if (rc != FC_OK) {
        fc_checkpoint_close(*out);
        *out = NULL;
    }
    if (o->recipe) {
        *rest = *o;
        rest->include = rest->exclude = rest->rename = (option_list){NULL, 0};
        rest->strip_prefix = NULL;
        call->options = rest;
    }
    return rc;
}
