/*
 * Finds tensors by name, and checks that tensors from several files have distinct names.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/checkpoint.h"

/** Puts the names of all values of `source` into a table, with their indices. @return NULL: out of memory. */
fc_name_table *fc_names_of(const fc_checkpoint *source, fc_arena *arena);

/**
 * Finds a name that two of `tensors` share.
 * @param name receives the first name that repeats an earlier one, or NULL when all names are distinct.
 * @return FC_OK or FC_ENOMEM.
 */
fc_code fc_find_same_name(const fc_tensor *tensors, size_t count, const char **name, fc_error *err);
