/*
 * Writes the header of a `.npy` file (numpy.lib.format) for `extract`.
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <stddef.h>
#include <stdint.h>

enum { NPY_HEADER_MAX = 1024 };

/**
 * Writes the header that numpy.save writes before a row-major array into `buf` of NPY_HEADER_MAX. Version 1.0 is long
 * enough for all shapes. Dtypes that NumPy lacks get the types that it writes for ml_dtypes: V2 for bfloat16, V1 for
 * fp8 and packed dtypes, V4 for complex32; use `.view(ml_dtypes.bfloat16)` after numpy.load. @return the number of
 * bytes, a multiple of 64.
 */
size_t npy_header(fc_dtype dtype, int ndim, const int64_t *shape, char *buf);
