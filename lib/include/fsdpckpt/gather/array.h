/*
 * Arrays: the elements of a tensor on one device. An array is a plain value over memory that it owns or borrows.
 */
#pragma once

#include "fsdpckpt/gather/device.h"

FC_BEGIN_DECLS

/** Strided elements on a device. A copy of the struct is a view of the same memory; free only one of the copies. */
typedef struct fc_array {
    fc_device *device; /**< borrowed */
    fc_dtype dtype;
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS]; /**< distance between neighbours along each dimension, in elements */
    void *data;                   /**< the element at index (0, …, 0) */
    void *memory;                 /**< the memory that fc_array_free releases; NULL for a view */
    bool requires_grad;
} fc_array;

/** Allocates a contiguous array on `device` with uninitialised elements. It may have no elements. */
fc_code fc_array_new(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, fc_array *out, fc_error *err);

/** Releases the memory that the array owns, and empties the array. No work on a stream may still use the memory. */
void fc_array_free(fc_array *array);

/** Makes a contiguous view of memory that the caller owns. */
fc_code fc_array_over(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, void *data, fc_array *out,
                      fc_error *err);

/** Returns the number of elements of an array, and their size in bytes when they are contiguous. */
int64_t fc_array_numel(const fc_array *array);
size_t fc_array_bytes(const fc_array *array);

/** Returns whether the elements are in row-major order without gaps. Strides of dimensions of size 1 are ignored. */
bool fc_array_is_contiguous(const fc_array *array);

/** Makes a view of [start, start + length) of dimension `dim`. @return FC_EUSAGE when that is not within the array. */
fc_code fc_array_narrow(const fc_array *array, int dim, int64_t start, int64_t length, fc_array *out, fc_error *err);

/** Copies the elements of `src` to `dst`, which has the same sizes and dtype. */
fc_code fc_array_copy(const fc_array *dst, const fc_array *src, fc_stream *stream, fc_error *err);

/** Makes a contiguous copy that does not require gradients, like tensor.detach().clone(). */
fc_code fc_array_clone(const fc_array *src, fc_stream *stream, fc_array *out, fc_error *err);

FC_END_DECLS
