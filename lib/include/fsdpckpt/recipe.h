/*
 * Recipes: the names and tensor layouts of one program as those of another one (docs/RECIPES.md). A recipe makes a
 * derived checkpoint whose chunks are boxes of the source at other strides, so it is read, converted and compared like
 * any other.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/target.h"

FC_BEGIN_DECLS

typedef struct fc_recipe fc_recipe;

typedef struct fc_recipe_options {
    bool reverse;       /**< from the recipe's second names and layouts to the first */
    const char *config; /**< the model's config.json, or its folder; NULL: none */
    bool headers_only;  /**< as in fc_open_options: steps of joined parameters are then not compared */
    bool as_written;    /**< keep expressions in patterns: the recipe is for reading, and cannot be applied */
} fc_recipe_options;

/**
 * Loads a recipe.
 * @param name_or_path the name of a shipped recipe, or a JSON file.
 * @param options      NULL for the defaults.
 * @param arena        owns the recipe.
 * @return FC_EUSAGE for a recipe that is malformed or cannot be reversed.
 */
fc_code fc_recipe_load(const char *name_or_path, const fc_recipe_options *options, fc_arena *arena,
                       const fc_recipe **out, fc_error *err);

/** A recipe that comes with the library. */
typedef struct fc_shipped_recipe {
    const char *name, *text; /**< the text is JSON */
} fc_shipped_recipe;

/** The shipped recipes, ended by one without a name. */
extern const fc_shipped_recipe fc_shipped_recipes[];

/** Returns the description of a recipe, for people. */
const char *fc_recipe_description(const fc_recipe *recipe);

/** The shipped recipes that fit a target. */
typedef struct fc_recipe_matches {
    const fc_recipe *recipe; /**< one of them; NULL: there is none */
    const char *name;        /**< its name */
    const char *names;       /**< all of them, for people: "'a', 'b'" */
    size_t count;
    const char *model; /**< the model of the configuration, if it decided, because several recipes fitted; or NULL */
    const char *model_key; /**< the key of config.json that names it; NULL like `model` */
    const char *tensor; /**< of the only match, a tensor for which no other recipe has a rule; NULL: none was found */
} fc_recipe_matches;

/** Like fc_recipe_find. @return FC_EUSAGE if none or several fit. */
fc_code fc_recipe_find_only(const fc_target *target, const fc_recipe_options *options, fc_arena *arena,
                            fc_recipe_matches *out, fc_error *err);

/**
 * Applies `recipe` to the values of `target`, under their names there. Objects that match no rule stay as they are.
 * fc_checkpoint.note of the result says what a reversed recipe does not restore.
 * @param target of `source`; its mesh and dtypes are not used. It need not outlive the call.
 * @param source belongs to the new checkpoint if the call succeeds, else to the caller.
 * @param out    closed by fc_checkpoint_close, which closes `source`; NULL after a failure.
 * @return FC_EUSAGE if no rule takes a tensor, shapes do not fit, or a size is unknown; FC_ECORRUPT if chunks
 *         do not cover a tensor.
 */
fc_code fc_recipe_apply(fc_checkpoint *source, const fc_target *target, const fc_recipe *recipe, fc_checkpoint **out,
                        fc_error *err);

FC_END_DECLS
