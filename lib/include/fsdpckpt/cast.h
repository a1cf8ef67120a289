/*
 * Casts between floating-point dtypes, with the results of torch. The only function that changes values.
 */
#ifndef FSDPCKPT_CAST_H
#define FSDPCKPT_CAST_H

#include "fsdpckpt/dtype.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Converts `count` elements as torch's Tensor.to(dtype) does (round to nearest even, NaN kept; through float32
 * where torch goes through it). Only between FC_CLASS_FLOAT types; `src` and `dst` do not overlap.
 */
void fc_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count);

#ifdef __cplusplus
}
#endif
#endif
