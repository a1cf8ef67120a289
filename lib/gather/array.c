/*
 * Arrays on a device: allocation, views and copies. Elements are only touched through fc_device, so the same code
 * serves host and GPU.
 */
#include "fsdpckpt/gather/array.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"

#include <string.h>

static fc_code byte_count(fc_dtype dtype, int ndim, const int64_t *sizes, size_t *out, fc_error *err) {
    int64_t count;
    if (ndim < 0 || ndim > FC_MAX_DIMS || !fc_numel(ndim, sizes, &count) ||
        !fc_mul_size((size_t)count, fc_dtype_size(dtype), out)) {
        return fc_fail(err, FC_EUSAGE,
                       "an array of %d dimensions has a negative size, or its size does not fit in 64 bits", ndim);
    }
    return FC_OK;
}

fc_code fc_array_over(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, void *data, fc_array *out,
                      fc_error *err) {
    size_t bytes = 0;
    FC_TRY(byte_count(dtype, ndim, sizes, &bytes, err));
    *out = (fc_array){.device = device, .dtype = dtype, .ndim = ndim, .data = data};
    for (int d = 0; d < ndim; d++) {
        out->sizes[d] = sizes[d];
    }
    if (!fc_row_major_strides(ndim, sizes, out->strides)) {
        return fc_fail(err, FC_EUSAGE, "the strides of an array do not fit in 64 bits");
    }
    return FC_OK;
}

fc_code fc_array_new(fc_device *device, fc_dtype dtype, int ndim, const int64_t *sizes, fc_array *out, fc_error *err) {
    size_t bytes = 0;
    FC_TRY(byte_count(dtype, ndim, sizes, &bytes, err));
    FC_TRY(fc_array_over(device, dtype, ndim, sizes, NULL, out, err));
    FC_TRY(device->alloc(device, bytes > 0 ? bytes : 1, &out->memory, err));
    out->data = out->memory;
    return FC_OK;
}

void fc_array_free(fc_array *array) {
    if (array->memory) {
        array->device->release(array->device, array->memory);
    }
    memset(array, 0, sizeof *array);
}

int64_t fc_array_numel(const fc_array *array) {
    int64_t count;
    return fc_numel(array->ndim, array->sizes, &count) ? count : 0;
}

size_t fc_array_bytes(const fc_array *array) {
    return (size_t)fc_array_numel(array) * fc_dtype_size(array->dtype);
}

bool fc_array_is_contiguous(const fc_array *array) {
    return fc_is_row_major(array->ndim, array->sizes, array->strides);
}

fc_code fc_array_narrow(const fc_array *array, int dim, int64_t start, int64_t length, fc_array *out, fc_error *err) {
    if (dim < 0 || dim >= array->ndim || start < 0 || length < 0 || start > array->sizes[dim] ||
        length > array->sizes[dim] - start) {
        return fc_fail(err, FC_EUSAGE, "%lld elements from index %lld of dimension %d are outside of the array",
                       (long long)length, (long long)start, dim);
    }
    int64_t skipped = length > 0 ? start * array->strides[dim] : 0;
    fc_array view = *array;
    view.memory = NULL;
    view.sizes[dim] = length;
    view.data = array->data ? (char *)array->data + skipped * (int64_t)fc_dtype_size(array->dtype) : NULL;
    *out = view;
    return FC_OK;
}

static fc_strided_box box_of(const fc_array *array) {
    fc_strided_box box = {.ndim = array->ndim};
    for (int d = 0; d < array->ndim; d++) {
        box.sizes[d] = array->sizes[d];
        box.strides[d] = array->strides[d];
    }
    return box;
}

fc_code fc_array_copy(const fc_array *dst, const fc_array *src, fc_stream *stream, fc_error *err) {
    bool same = dst->ndim == src->ndim && dst->dtype == src->dtype;
    for (int d = 0; same && d < src->ndim; d++) {
        same = dst->sizes[d] == src->sizes[d];
    }
    if (!same) {
        return fc_fail(err, FC_EUSAGE, "arrays of different sizes or dtypes cannot be copied to each other");
    }
    if (fc_array_numel(src) == 0) {
        return FC_OK;
    }
    fc_device *device = dst->device->is_host ? src->device : dst->device;
    if (fc_array_is_contiguous(dst) && fc_array_is_contiguous(src)) {
        return device->copy(device, dst->data, src->data, fc_array_bytes(src), stream, err);
    }
    if (dst->device != src->device && dst->device->is_host != src->device->is_host) {
        return fc_fail(err, FC_EUSAGE,
                       "only contiguous arrays can be copied between host and device: clone the strided one first");
    }
    fc_strided_box to = box_of(dst), from = box_of(src);
    return device->copy_box(device, dst->data, &to, src->data, &from, fc_dtype_size(src->dtype), stream, err);
}

fc_code fc_array_clone(const fc_array *src, fc_stream *stream, fc_array *out, fc_error *err) {
    fc_array copy = {0};
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(src->device, src->dtype, src->ndim, src->sizes, &copy, err), rc, fail);
    FC_TRY_GOTO(fc_array_copy(&copy, src, stream, err), rc, fail);
    *out = copy;
    return FC_OK;
fail:
    fc_array_free(&copy);
    return rc;
}
