/*
 * The element types of safetensors and how ours stand there.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_DTYPES_H
#define FSDPCKPT_FORMATS_SAFETENSORS_DTYPES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/dtype.h"

/** One type of the format. */
typedef struct st_dtype {
    const char *name; /**< as in headers: "BF16" */
    uint32_t bits;    /**< of an element */
    bool readable;    /**< there is a type of ours for it */
    fc_dtype dtype;
} st_dtype;

/** Finds a type by its name in headers. @return NULL when the format has none of that name. */
const st_dtype *fc_st_dtype_find(const char *name);

/** Where a type stands in the order in which the reference writer lays out tensors: higher ones first. */
int fc_st_dtype_order(const st_dtype *dtype);

/** How a tensor of one of our types is stored. */
typedef struct st_stored {
    const st_dtype *as;
    int64_t widen;   /**< the last size and offset are multiplied by this: 2 for two numbers an element */
    int64_t append;  /**< a last dimension of this size is added; 0: none */
    bool remembered; /**< `as` alone does not say which type it is: `__metadata__` names it */
} st_stored;

/** How a tensor of `dtype` with `ndim` dimensions is stored. */
st_stored fc_st_stored_as(fc_dtype dtype, int ndim);

#endif
