/*
 * Classifies the values of a checkpoint by name and type, for the module tree and for flat parameters; ties values, and
 * makes copies that are not tied.
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

/** Copies the chunks of `t`, which is a copy of another value, without the places of their bytes. So the values are not
 * tied: torch's optimizers change theirs in place. Objects stay as they are. @return false when out of memory. */
bool fc_untie(fc_tensor *t, fc_arena *arena);
