/*
 * --recipe, --reverse and --config: applies a recipe to a source.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/recipe.h"
#include "fsdpckpt/select.h"

/** The help of --config for commands that do not take --dequantize. */
#define RECIPE_CONFIG_HELP                                                                                             \
    "config.json of the model, or its folder, from which --recipe takes sizes such as num_attention_heads (default: "  \
    "the one next to SRC)"

/**
 * Opens a checkpoint like source_open, and applies --dequantize, --adapter, --recipe and --quantize to it.
 * @param rest with --recipe, call->options becomes this copy, which selects and renames nothing: the recipe is applied
 * to what the options select, under the names that they give.
 */
fc_code recipe_open(cli_call *call, options *rest, const char *path, bool headers_only, fc_checkpoint **out,
                    fc_error *err);

/** Returns whether the options make recipe_open change the checkpoint. */
bool recipe_changes(const options *o);

/** Refuses --reverse and --config without --recipe. */
fc_code recipe_check_options(const options *o, fc_error *err);

/** Returns why a recipe was found, as the end of a sentence; in the arena, NULL: out of memory. */
const char *recipe_reason(const fc_recipe_matches *found, fc_arena *arena);

/**
 * Replaces `*source` by the result of the recipe for its selected and renamed values.
 * @param headers_only as in fc_recipe_options.
 * @param left_out     receives how many values the selection left out.
 */
fc_code recipe_apply(const options *o, const fc_selection *selection, bool headers_only, fc_checkpoint **source,
                     size_t *left_out, fc_error *err);
