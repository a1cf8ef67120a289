/*
 * Writes a seal, the JSON file next to a checkpoint that lib/checkpoint/seal.c reads.
 */
#pragma once

#include "options/options.h"

#include "fsdpckpt/seal.h"

/** Writes `seal` to its path, completely or not at all. An existing seal is replaced only with --force. */
fc_code seal_write(const options *o, const fc_checkpoint *checkpoint, const fc_seal *seal, fc_error *err);
