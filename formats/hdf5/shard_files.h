/*
 * The files of a directory of shards.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** Puts the shard files of `ranks` ranks into checkpoint->files, after index.h5. */
fc_code fc_h5_name_shards(fc_checkpoint *checkpoint, const char *directory, int64_t ranks, fc_error *err);

/** Refuses shard files for another number of ranks: a sign that two checkpoints are mixed. */
fc_code fc_h5_check_directory(const char *directory, int64_t ranks, fc_error *err);
