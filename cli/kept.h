/*
 * The files of an old directory of a model that a new one takes over: config.json, the tokenizer, the model card.
 */
#pragma once

#include "options/options.h"

#include "fsdpckpt/arena.h"
#include "fsdpckpt/move.h"

typedef struct kept_files {
    const char *from;         /**< the old directory */
    const char *const *names; /**< ended by NULL; NULL: there are none */
    bool dequantized;         /**< the weights are; what config.json says of quantization is left out */
    fc_dtype dtype;           /**< of weights that were dequantized */
    fc_code (*add_files)(void *context, const char *staging, fc_error *err); /**< what `how` had before */
    void *add_context;
} kept_files;

/**
 * With --force onto a directory, for a format with Hugging Face's layout: makes `how` keep the files of the old
 * directory that are not weights, except those that `how` adds itself. `kept` must live as long as `how`.
 */
fc_code kept_prepare(const options *o, fc_convert_options *how, fc_arena *arena, kept_files *kept, fc_error *err);
