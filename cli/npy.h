/*
 * The header of a `.npy` file (numpy.lib.format), for `extract`.
 */
#ifndef FSDPCKPT_CLI_NPY_H
#define FSDPCKPT_CLI_NPY_H

#include "fsdpckpt/dtype.h"

#include <stddef.h>
#include <stdint.h>

enum { NPY_HEADER_MAX = 1024 };

/**
 * The bytes that numpy.save writes before the elements of a row-major array, into `buf` of NPY_HEADER_MAX: version 1.0,
 * as no shape of ours needs the longer headers of 2.0 (nor the UTF-8 of 3.0).
 * Types that numpy lacks are what it writes for those of ml_dtypes: V2 for bfloat16, V1 for fp8 and packed ones (where
 * it writes what it cannot load, float8_e5m2, too), V4 for complex32: after numpy.load, `.view(ml_dtypes.bfloat16)`.
 * @return their number, a multiple of 64.
 */
size_t npy_header(fc_dtype dtype, int ndim, const int64_t *shape, char *buf);

#endif
