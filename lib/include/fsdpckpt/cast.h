/*
 * Casts between floating-point dtypes, with the results of torch. The only function that changes values.
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <stddef.h>

FC_BEGIN_DECLS

/**
 * Converts `count` elements between FC_CLASS_FLOAT types like torch's Tensor.to(dtype): it rounds to nearest even,
 * keeps NaN, and goes through float32 where torch does. `src` and `dst` must not overlap.
 */
void fc_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count);

FC_END_DECLS
