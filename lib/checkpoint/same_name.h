/*
 * Whether tensors have names of their own.
 */
#ifndef FSDPCKPT_CHECKPOINT_SAME_NAME_H
#define FSDPCKPT_CHECKPOINT_SAME_NAME_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"

/**
 * Finds a name that two of `tensors` have.
 * @param name out: that of the first one whose name an earlier one has; NULL: there is none.
 * @return FC_ENOMEM.
 */
fc_code fc_find_same_name(const fc_tensor *tensors, size_t count, const char **name, fc_error *err);

#endif
