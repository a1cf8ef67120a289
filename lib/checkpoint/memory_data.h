/*
 * Which data of a checkpoint in memory this process has.
 */
#pragma once

#include "fsdpckpt/memory.h"

/** Returns whether another rank has the data of a chunk of value `index`. */
bool fc_memory_lacks_data(const fc_checkpoint *checkpoint, size_t index);

/** Returns whether this process has the data of chunk `chunk`, an index into the chunks of value `index`. */
bool fc_memory_has_data(const fc_checkpoint *checkpoint, size_t index, size_t chunk);
