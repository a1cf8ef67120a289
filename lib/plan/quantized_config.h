/*
 * The files next to a checkpoint that say that its weights are quantized.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/**
 * Looks in the folder of the source, and in those of its files.
 * @param out receives the path of the file, which `arena` owns; NULL: there is none.
 * @return FC_ENOMEM. A file that cannot be read says nothing.
 */
fc_code fc_quantized_config_find(const fc_checkpoint *source, fc_arena *arena, const char **out, fc_error *err);

/** Returns whether only quantizers write a file of this name, such as hf_quant_config.json. */
bool fc_is_quantizer_file(const char *name);
