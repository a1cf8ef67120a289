/*
 * Which data of a checkpoint in memory this process has.
 */
#ifndef FSDPCKPT_CHECKPOINT_MEMORY_DATA_H
#define FSDPCKPT_CHECKPOINT_MEMORY_DATA_H

#include "fsdpckpt/memory.h"

/** Returns whether another rank has the data of a chunk of value `index`. */
bool fc_memory_lacks_data(const fc_checkpoint *checkpoint, size_t index);

/** Returns whether this process has the data of chunk `chunk`, an index into the chunks of value `index`. */
bool fc_memory_has_data(const fc_checkpoint *checkpoint, size_t index, size_t chunk);

#endif
