/*
 * Devices: the processor with host memory, or a GPU. A device is a struct of function pointers, so the training step
 * and the sharding of tensors are written once for all devices. A stream does its work in order. On the processor, work
 * is done before the call returns.
 */
#pragma once

#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

typedef struct fc_stream fc_stream; /**< NULL stands for the default stream */
typedef struct fc_event fc_event;
typedef struct fc_device fc_device;

/** A box of elements in a strided array: element (i0, i1, …) is at `first` + i0 × strides[0] + …, in elements. */
typedef struct fc_strided_box {
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS];
    int64_t first;
} fc_strided_box;

/** How many partial sums `powers` has: enough for a GPU's threads. */
enum { FC_POWER_SUMS = 65536 };

/** Memory is that of the device, unless a function says otherwise. */
struct fc_device {
    const char *name; /**< "cpu", "cuda:0" */
    bool is_host;     /**< whether the processor can read and write the memory */
    void *state;      /**< private to the device */

    /** Allocates `bytes` bytes of device memory; `release` frees them. */
    fc_code (*alloc)(fc_device *device, size_t bytes, void **out, fc_error *err);
    void (*release)(fc_device *device, void *memory);
    /** Allocates host memory for fast transfers (page-locked for a GPU); `release_staging` frees it. */
    fc_code (*alloc_staging)(fc_device *device, size_t bytes, void **out, fc_error *err);
    void (*release_staging)(fc_device *device, void *memory);

    fc_code (*stream_new)(fc_device *device, fc_stream **out, fc_error *err);
    void (*stream_free)(fc_device *device, fc_stream *stream);
    /** Waits until the stream has done all its work. */
    fc_code (*synchronize)(fc_device *device, fc_stream *stream, fc_error *err);
    fc_code (*event_new)(fc_device *device, fc_event **out, fc_error *err);
    void (*event_free)(fc_device *device, fc_event *event);
    /** Makes `event` happen when the stream has done all work that was queued before. */
    fc_code (*record)(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err);
    /** Delays all later work on `stream` until `event` has happened. */
    fc_code (*wait)(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err);

    /** Copies bytes between host and device, or within either. */
    fc_code (*copy)(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream, fc_error *err);
    /** Sets `bytes` bytes to 0. */
    fc_code (*zero)(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err);
    /** Copies a strided box to a strided box of the same sizes, with elements of `element` bytes. It packs if `dst` is
     *  contiguous, and unpacks if `src` is. */
    fc_code (*copy_box)(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                        const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err);
    /** Converts `count` elements. The result equals fc_cast and Tensor.to(dtype) bit for bit. */
    fc_code (*cast)(fc_device *device, fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                    fc_stream *stream, fc_error *err);
    /** Adds `src` to `dst` like torch's add_: f16 and bf16 are computed in float32 and rounded. */
    fc_code (*add)(fc_device *device, fc_dtype dtype, void *dst, const void *src, size_t count, fc_stream *stream,
                   fc_error *err);
    /** Divides `data` by `divisor` like torch's div_. */
    fc_code (*divide)(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count, fc_stream *stream,
                      fc_error *err);
    /** Multiplies `data` by `factor` like torch's mul_. */
    fc_code (*multiply)(fc_device *device, fc_dtype dtype, void *data, double factor, size_t count, fc_stream *stream,
                        fc_error *err);
    /**
     * Adds weight × |x|^p of all elements to `sums`, FC_POWER_SUMS float64 numbers whose sum is the result, in an order
     * that depends only on `count`. If p is infinite, `sums` are maxima of |x| and there is no weight; a NaN stays.
     * `dtype` is floating-point.
     */
    fc_code (*powers)(fc_device *device, fc_dtype dtype, const void *data, double p, double weight, size_t count,
                      double *sums, fc_stream *stream, fc_error *err);
    void (*destroy)(fc_device *device);
};

/** Makes a device for the processor. Its `destroy` frees it. */
fc_code fc_device_cpu(fc_device **out, fc_error *err);

/**
 * Makes a device for GPU number `index`, and loads the CUDA module for it.
 * @return FC_EUNSUPPORTED with the reason: built without CUDA, module not found, no driver, or no such GPU.
 */
fc_code fc_device_cuda(int index, fc_device **out, fc_error *err);

FC_END_DECLS
