/*
 * Values in memory, as Python describes them: a row is (name, path, dtype or None, encoding or None, shape, chunks),
 * and may end with the name of an earlier tensor that is the same memory, or None.
 */
#pragma once

#include "native.h"

#include "fsdpckpt/memory.h"

/**
 * Converts a sequence of rows. A path is a tuple of keys; the index into a list is ("0", is_tuple). A chunk is
 * (offsets, sizes, strides or None, address, rank or None); offsets and sizes None: the whole value. Address 0: another
 * process has it.
 * @return false with an exception set.
 */
bool native_rows(PyObject *rows, fc_arena *arena, fc_memory_tensor **out, size_t *count);

/** Checks that this process has the elements of all values. @return false with an exception set. */
bool native_rows_have_data(const fc_memory_tensor *tensors, size_t count);
