/*
 * Checks that tensors from several files have distinct names.
 */
#ifndef FSDPCKPT_CHECKPOINT_SAME_NAME_H
#define FSDPCKPT_CHECKPOINT_SAME_NAME_H

#include "fsdpckpt/checkpoint.h"

/**
 * Finds a name that two of `tensors` share.
 * @param name receives the first name that repeats an earlier one, or NULL when all names are distinct.
 * @return FC_OK or FC_ENOMEM.
 */
fc_code fc_find_same_name(const fc_tensor *tensors, size_t count, const char **name, fc_error *err);

#endif
