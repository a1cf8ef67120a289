/*
 * Where the data of a running job lies: host memory or a GPU. One struct of function pointers, so that train and
 * the sharding of tensors are written once. Work given to a stream is done in order; on the host it is done at once.
 */
#ifndef FSDPCKPT_DEVICE_H
#define FSDPCKPT_DEVICE_H

#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_stream fc_stream; /**< NULL: the default stream */
typedef struct fc_event fc_event;
typedef struct fc_device fc_device;

/** A box of elements within a strided array: element (i0, i1, …) is at `first` + i0·strides[0] + … (elements). */
typedef struct fc_strided_box {
    int ndim;
    int64_t sizes[FC_MAX_DIMS];
    int64_t strides[FC_MAX_DIMS];
    int64_t first;
} fc_strided_box;

/** All functions but the `…_free` return FC_OK or set the error; all pointers are the device's unless said so. */
struct fc_device {
    const char *name; /**< "cpu", "cuda:0" */
    bool is_host;     /**< the memory can be read and written by the processor */
    void *state;      /**< private */

    fc_code (*alloc)(fc_device *device, size_t bytes, void **out, fc_error *err);
    void (*release)(fc_device *device, void *memory);
    /** Host memory that transfers fast (page-locked for a GPU). */
    fc_code (*alloc_staging)(fc_device *device, size_t bytes, void **out, fc_error *err);
    void (*release_staging)(fc_device *device, void *memory);

    fc_code (*stream_new)(fc_device *device, fc_stream **out, fc_error *err);
    void (*stream_free)(fc_device *device, fc_stream *stream);
    /** Blocks the caller until everything given to the stream is done. */
    fc_code (*synchronize)(fc_device *device, fc_stream *stream, fc_error *err);
    fc_code (*event_new)(fc_device *device, fc_event **out, fc_error *err);
    void (*event_free)(fc_device *device, fc_event *event);
    fc_code (*record)(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err);
    /** What is given to `stream` from now on starts after `event`. */
    fc_code (*wait)(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err);

    /** Copies bytes in any direction between host and device. */
    fc_code (*copy)(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream, fc_error *err);
    fc_code (*zero)(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err);
    /** Copies the elements of a strided box to a strided box of equal sizes, `element` bytes each: pack when dst is
     *  contiguous, unpack when src is. */
    fc_code (*copy_box)(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                        const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err);
    /** As fc_cast: bit for bit what Tensor.to(dtype) gives. */
    fc_code (*cast)(fc_device *device, fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                    fc_stream *stream, fc_error *err);
    /** dst += src, in dtype (f16 and bf16: computed in float32 and rounded, as torch's add_). */
    fc_code (*add)(fc_device *device, fc_dtype dtype, void *dst, const void *src, size_t count, fc_stream *stream,
                   fc_error *err);
    /** data /= divisor, in dtype, as torch's div_. */
    fc_code (*divide)(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count, fc_stream *stream,
                      fc_error *err);
    void (*destroy)(fc_device *device);
};

/** The processor. A new one each time, freed by its `destroy`. */
fc_code fc_device_cpu(fc_device **out, fc_error *err);

/**
 * GPU number `index`, from the CUDA module, which is loaded when this is called.
 * @return FC_EUNSUPPORTED with the reason: built without CUDA, module not found, no driver, no such GPU.
 */
fc_code fc_device_cuda(int index, fc_device **out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
