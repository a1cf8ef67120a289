/*
 * Classifies the values of a checkpoint by name and type, for the module tree and for flat parameters.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"

/** @return whether `name` is a name of optimizer state. */
bool fc_is_optimizer_state(const char *name);

/** @return whether `name` is a name of an optimizer's values: its state, its parameter groups, or below a key such as
 * "optimizer". */
bool fc_is_of_optimizer(const char *name);

/** @return whether a module would hold this value as a buffer, judging by name and type. */
bool fc_is_buffer(const char *name, fc_dtype dtype);
