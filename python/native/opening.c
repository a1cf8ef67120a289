/*
 * Opening a checkpoint and selecting its values. See opening.h.
 */
#include "opening.h"

#include "fsdpckpt/fsdpckpt.h"
#include "fsdpckpt/try.h"

#include <string.h>

static fc_code open_source(const native_open_request *r, fc_arena *arena, fc_checkpoint **out, fc_error *err) {
    fc_open_options how = {.headers_only = r->headers_only != 0,
                           .follow_external = r->follow_external != 0,
                           .reporter = native_reporter(),
                           .others = native_reporter()};
    fc_checkpoint *model = NULL;
    if (r->rows) {
        return fc_checkpoint_in_memory(r->path, r->rows, r->nrows, out, err);
    }
    fc_code rc = r->tp_plan ? fc_tp_plan_load(r->tp_plan, arena, &how.tp_plan, err) : FC_OK;
    if (rc == FC_OK && r->schema) {
        const fc_open_options names = {.headers_only = true,
                                       .follow_external = how.follow_external,
                                       .reporter = native_reporter(),
                                       .others = native_reporter()};
        rc = fc_checkpoint_open_model(r->schema, &names, NULL, &model, err);
    }
    rc = rc == FC_OK ? fc_checkpoint_open_model(r->path, &how, model, out, err) : rc;
    fc_checkpoint_close(model);
    return rc;
}

/* Loads the recipe, or finds the only one that fits. */
static fc_code load_recipe(const native_open_request *r, const fc_recipe_options *how, const native_opened *o,
                           const fc_recipe **out, fc_error *err) {
    fc_recipe_matches found;
    if (strcmp(r->recipe, "auto") != 0) {
        return fc_recipe_load(r->recipe, how, o->arena, out, err);
    }
    FC_TRY(fc_recipe_find_only(&o->target, how, o->arena, &found, err));
    *out = found.recipe;
    return FC_OK;
}

/* Replaces the checkpoint by what the recipe makes of its selected values, and selects all of that. */
static fc_code apply_recipe(const native_open_request *r, native_opened *o, fc_error *err) {
    const fc_recipe_options how = {
        .reverse = r->reverse != 0, .config = r->config, .headers_only = r->headers_only != 0};
    const fc_recipe *recipe = NULL;
    fc_checkpoint *made = NULL;
    fc_selected counts;
    FC_TRY(load_recipe(r, &how, o, &recipe, err));
    FC_TRY(fc_recipe_apply(o->checkpoint, &o->target, recipe, &made, err));
    o->checkpoint = made;
    o->selection = (fc_selection){.include = NULL};
    return fc_target_new(made, &o->selection, o->arena, &o->target, &counts, err);
}

/* Replaces the checkpoint by what it is with the deltas applied. */
static fc_code apply_deltas(const native_open_request *r, native_opened *o, fc_error *err) {
    fc_checkpoint *made = NULL;
    size_t count = 0;
    while (r->delta[count]) {
        count++;
    }
    if (count > 0) {
        FC_TRY(fc_delta_patch(o->checkpoint, r->delta, count, r->up_to, &made, err));
        o->checkpoint = made;
    }
    return FC_OK;
}

fc_code native_open(const native_open_request *r, native_opened *out, fc_error *err) {
    fc_selected counts;
    FC_TRY(open_source(r, out->arena, &out->checkpoint, err));
    if (r->model_only) {
        fc_model_place place;
        FC_TRY(fc_model_only(&out->checkpoint, out->arena, &place, err));
    }
    FC_TRY(r->delta ? apply_deltas(r, out, err) : FC_OK);
    out->selection = r->selection;
    if (out->checkpoint->ntensors > 0) {
        FC_TRY(fc_target_new(out->checkpoint, &r->selection, out->arena, &out->target, &counts, err));
    }
    return r->recipe ? apply_recipe(r, out, err) : FC_OK;
}

bool native_open_is_remote(const native_open_request *r) {
    const char *const names[] = {r->path, r->schema, r->recipe, r->config, r->tp_plan};
    bool is = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        is = is || (names[i] && strstr(names[i], "://"));
    }
    for (const char *const *d = r->delta; d && *d; d++) {
        is = is || strstr(*d, "://");
    }
    return is;
}
