/*
 * The dtypes of safetensors, and how the dtypes of torch are stored in them.
 */
#pragma once

#include "fsdpckpt/dtype.h"

/** One dtype of the format. */
typedef struct fc_st_dtype {
    const char *name; /**< The name in headers, e.g. "BF16". */
    uint32_t bits;    /**< Bits per element. */
    bool readable;    /**< torch has this dtype; `dtype` is valid. */
    fc_dtype dtype;
} fc_st_dtype;

/** Finds a dtype by its name in headers. @return NULL if the format has no such dtype. */
const fc_st_dtype *fc_st_dtype_find(const char *name);

/** Returns the rank of a dtype in the reference writer's layout, which places higher ranks first. */
int fc_st_dtype_order(const fc_st_dtype *dtype);

/** How a tensor of one of torch's dtypes is stored. */
typedef struct fc_st_stored {
    const fc_st_dtype *as;
    int64_t widen;   /**< Factor for the last size and offset: 2 if an element holds two numbers. */
    int64_t append;  /**< Size of a last dimension that is added; 0 if none is. */
    bool remembered; /**< `as` does not determine the dtype, so `__metadata__` names it. */
} fc_st_stored;

/** Returns how a tensor of `dtype` with `ndim` dimensions is stored. */
fc_st_stored fc_st_stored_as(fc_dtype dtype, int ndim);
