/*
 * Arrays: a tensor's elements on one device, as train meets them. A plain value over memory that it owns or borrows.
 */
#ifndef FSDPCKPT_ARRAY_H
#define FSDPCKPT_ARRAY_H

#include "fsdpckpt/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Strided elements on a device. Copying the struct makes a view: only one of the copies may be freed. */
typedef struct fc_array {
    fc_device *device; /**< borrowed */
    fc_dtype dtype;
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS]; /**< elements */
    void *data;                   /**< the element at index 0, … */
    void *memory;                 /**< what fc_array_free releases; NULL: a view, or nothing */
    bool requires_grad;
} fc_array;

/** Allocates a contiguous array on `device`, its elements unset. Zero elements are fine. */
fc_code fc_array_new(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, fc_array *out, fc_error *err);

/** Releases what the array owns and empties it. What still runs on a stream must not use the memory. */
void fc_array_free(fc_array *array);

/** A contiguous view of memory that somebody else owns. */
fc_code fc_array_over(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, void *data, fc_array *out,
                      fc_error *err);

/** Number of elements of an array that was made here, and their bytes when contiguous. */
int64_t fc_array_numel(const fc_array *array);
size_t fc_array_bytes(const fc_array *array);

/** Whether the elements lie in row-major order without gaps. Strides of dimensions of size 1 do not matter. */
bool fc_array_is_contiguous(const fc_array *array);

/** A view of [start, start + length) of dimension `dim`. @return FC_EUSAGE when it is not inside. */
fc_code fc_array_narrow(const fc_array *array, int dim, int64_t start, int64_t length, fc_array *out, fc_error *err);

/** dst = src, elementwise; equal sizes and dtype. */
fc_code fc_array_copy(const fc_array *dst, const fc_array *src, fc_stream *stream, fc_error *err);

/** A contiguous copy that does not require gradients: tensor.detach().clone(). */
fc_code fc_array_clone(const fc_array *src, fc_stream *stream, fc_array *out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
