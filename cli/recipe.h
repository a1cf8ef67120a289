/*
 * --recipe, --reverse and --config: makes a source what a recipe makes of it.
 */
#ifndef FSDPCKPT_CLI_RECIPE_H
#define FSDPCKPT_CLI_RECIPE_H

#include "command.h"

#include "fsdpckpt/select.h"

/** Refuses --reverse and --config without --recipe. */
fc_code recipe_check_options(const options *o, fc_error *err);

/**
 * Replaces `*source` by the checkpoint that the recipe makes of its selected and renamed values.
 * @param left_out receives how many values the selection left out.
 */
fc_code recipe_apply(const options *o, const fc_selection *selection, fc_checkpoint **source, size_t *left_out,
                     fc_error *err);

#endif
