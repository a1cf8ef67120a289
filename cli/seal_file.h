/*
 * Writes a seal, the JSON file next to a checkpoint that lib/checkpoint/seal.c reads.
 */
#ifndef FSDPCKPT_CLI_SEAL_FILE_H
#define FSDPCKPT_CLI_SEAL_FILE_H

#include "fsdpckpt/seal.h"

/** Writes `seal` to its path, completely or not at all. An existing seal is replaced only with `force`. */
fc_code seal_write(const fc_checkpoint *checkpoint, const fc_seal *seal, bool force, fc_error *err);

#endif
