/*
 * What the module tree and flat parameters both ask of a checkpoint's values.
 */
#ifndef FSDPCKPT_CHECKPOINT_PARAMETERS_H
#define FSDPCKPT_CHECKPOINT_PARAMETERS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/** Whether the name is one of optimizer state. */
bool fc_is_optimizer_state(const char *name);

/** Whether a module has this as a buffer, as far as name and type tell. */
bool fc_is_buffer(const char *name, fc_dtype dtype);

#endif
