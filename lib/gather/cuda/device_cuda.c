/*
 * The module `cuda` (see comm/module.h): a GPU as a device. Memory, streams and events come from the CUDA runtime;
 * strided copies, casts and arithmetic from kernels.cu. The runtime is linked statically, so the module also loads on a
 * machine without a driver, and can report that.
 */
#include "comm/arith.h"
#include "fsdpckpt/try.h"
#include "gather/boxes.h"
#include "gather/cuda/device.h"
#include "gather/cuda/kernels.h"
#include "gather/module.h"

#include <stdio.h>
#include <stdlib.h>

static fc_code check_result(const fc_device *device, cudaError_t result, const char *what, fc_error *err) {
    if (result == cudaSuccess) {
        return FC_OK;
    }
    cudaGetLastError(); /* it is reported here, so a later caller of this function must not see it */
    return fc_fail(err, result == cudaErrorMemoryAllocation ? FC_ENOMEM : FC_EIO, "%s: %s: %s", device->name, what,
                   cudaGetErrorString(result));
}

/* Makes a call of the CUDA runtime on the GPU of `device`. */
#define CALL(result, device, call)                                                                                     \
    do {                                                                                                               \
        int before_;                                                                                                   \
        (result) = fc_cuda_enter(device, &before_);                                                                    \
        if ((result) == cudaSuccess) {                                                                                 \
            (result) = (call);                                                                                         \
        }                                                                                                              \
        fc_cuda_leave(device, before_);                                                                                \
    } while (0)

/* The same; returns its outcome from the enclosing function. */
#define RETURN_CALL(device, what, call, err)                                                                           \
    do {                                                                                                               \
        cudaError_t result_;                                                                                           \
        CALL(result_, device, call);                                                                                   \
        return check_result(device, result_, what, err);                                                               \
    } while (0)

/* The same for calls that release something: they are made even if the GPU cannot be chosen, which they do not need. */
#define RELEASE_CALL(device, call)                                                                                     \
    do {                                                                                                               \
        int before_;                                                                                                   \
        fc_cuda_enter(device, &before_);                                                                               \
        call;                                                                                                          \
        fc_cuda_leave(device, before_);                                                                                \
    } while (0)

static fc_code cuda_alloc(fc_device *device, size_t bytes, void **out, fc_error *err) {
    *out = NULL;
    RETURN_CALL(device, "allocating memory", cudaMalloc(out, bytes ? bytes : 1), err);
}

static void cuda_release(fc_device *device, void *memory) {
    if (memory) {
        RELEASE_CALL(device, cudaFree(memory));
    }
}

static fc_code cuda_alloc_staging(fc_device *device, size_t bytes, void **out, fc_error *err) {
    *out = NULL;
    RETURN_CALL(device, "allocating page-locked memory", cudaMallocHost(out, bytes ? bytes : 1), err);
}

static void cuda_release_staging(fc_device *device, void *memory) {
    if (memory) {
        RELEASE_CALL(device, cudaFreeHost(memory));
    }
}

static fc_code cuda_stream_new(fc_device *device, fc_stream **out, fc_error *err) {
    fc_stream *stream = malloc(sizeof *stream);
    *out = NULL;
    FC_NEED(stream, err, device->name);
    cudaError_t result;
    CALL(result, device, cudaStreamCreateWithFlags(&stream->cuda, cudaStreamNonBlocking));
    if (result != cudaSuccess) {
        free(stream);
        return check_result(device, result, "creating a stream", err);
    }
    *out = stream;
    return FC_OK;
}

static void cuda_stream_free(fc_device *device, fc_stream *stream) {
    if (stream) {
        RELEASE_CALL(device, cudaStreamDestroy(stream->cuda));
        free(stream);
    }
}

static fc_code cuda_synchronize(fc_device *device, fc_stream *stream, fc_error *err) {
    RETURN_CALL(device, "waiting for a stream", cudaStreamSynchronize(fc_cuda_stream(stream)), err);
}

static fc_code cuda_event_new(fc_device *device, fc_event **out, fc_error *err) {
    fc_event *event = malloc(sizeof *event);
    *out = NULL;
    FC_NEED(event, err, device->name);
    cudaError_t result;
    CALL(result, device, cudaEventCreateWithFlags(&event->cuda, cudaEventDisableTiming));
    if (result != cudaSuccess) {
        free(event);
        return check_result(device, result, "creating an event", err);
    }
    *out = event;
    return FC_OK;
}

static void cuda_event_free(fc_device *device, fc_event *event) {
    if (event) {
        RELEASE_CALL(device, cudaEventDestroy(event->cuda));
        free(event);
    }
}

static fc_code cuda_record(fc_device *device, fc_event *event, fc_stream *stream, fc_error *err) {
    RETURN_CALL(device, "recording an event", cudaEventRecord(event->cuda, fc_cuda_stream(stream)), err);
}

static fc_code cuda_wait(fc_device *device, fc_stream *stream, fc_event *event, fc_error *err) {
    RETURN_CALL(device, "waiting for an event", cudaStreamWaitEvent(fc_cuda_stream(stream), event->cuda, 0), err);
}

static fc_code cuda_copy(fc_device *device, void *dst, const void *src, size_t bytes, fc_stream *stream,
                         fc_error *err) {
    if (bytes == 0) {
        return FC_OK;
    }
    RETURN_CALL(device, "copying", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, fc_cuda_stream(stream)), err);
}

static fc_code cuda_zero(fc_device *device, void *dst, size_t bytes, fc_stream *stream, fc_error *err) {
    if (bytes == 0) {
        return FC_OK;
    }
    RETURN_CALL(device, "setting memory to zero", cudaMemsetAsync(dst, 0, bytes, fc_cuda_stream(stream)), err);
}

static fc_code cuda_copy_box(fc_device *device, void *dst, const fc_strided_box *to, const void *src,
                             const fc_strided_box *from, uint32_t element, fc_stream *stream, fc_error *err) {
    fc_strided copy;
    bool empty;
    FC_TRY(fc_strided_box_check(to, from, element, &empty, err));
    if (empty) {
        return FC_OK;
    }
    if (!fc_strided_make(&copy, to->ndim, to->sizes, from->strides, to->strides, element)) {
        return fc_fail(err, FC_EUSAGE, "%s: the bytes of a box do not fit in 64 bits", device->name);
    }
    const char *first = (const char *)src + from->first * element;
    char *target = (char *)dst + to->first * element;
    RETURN_CALL(device, "copying a box", fc_cuda_copy(&copy, first, target, fc_cuda_stream(stream)), err);
}

static fc_code cuda_cast(fc_device *device, fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                         fc_stream *stream, fc_error *err) {
    if (from != to && (fc_dtype_get(from)->cls != FC_CLASS_FLOAT || fc_dtype_get(to)->cls != FC_CLASS_FLOAT)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s cannot be cast to %s", device->name,
                       fc_dtype_get(from)->torch_name, fc_dtype_get(to)->torch_name);
    }
    RETURN_CALL(device, "casting", fc_cuda_cast(from, src, to, dst, count, fc_cuda_stream(stream)), err);
}

static fc_code cuda_add(fc_device *device, fc_dtype dtype, void *dst, const void *src, size_t count, fc_stream *stream,
                        fc_error *err) {
    size_t components;
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_SUM, err));
    fc_dtype of = fc_arith_component(dtype, &components);
    RETURN_CALL(device, "adding", fc_cuda_add(of, dst, src, count * components, fc_cuda_stream(stream)), err);
}

static fc_code cuda_divide(fc_device *device, fc_dtype dtype, void *data, double divisor, size_t count,
                           fc_stream *stream, fc_error *err) {
    size_t components;
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_AVG, err));
    fc_dtype of = fc_arith_component(dtype, &components);
    RETURN_CALL(device, "dividing", fc_cuda_divide(of, data, divisor, count * components, fc_cuda_stream(stream)), err);
}

static fc_code cuda_multiply(fc_device *device, fc_dtype dtype, void *data, double factor, size_t count,
                             fc_stream *stream, fc_error *err) {
    size_t components;
    FC_TRY(fc_arith_check(dtype, FC_REDUCE_AVG, err));
    fc_dtype of = fc_arith_component(dtype, &components);
    RETURN_CALL(device, "multiplying", fc_cuda_multiply(of, data, factor, count * components, fc_cuda_stream(stream)),
                err);
}

static fc_code cuda_powers(fc_device *device, fc_dtype dtype, const void *data, double p, double weight, size_t count,
                           double *sums, fc_stream *stream, fc_error *err) {
    if (fc_dtype_get(dtype)->cls != FC_CLASS_FLOAT) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: %s has no powers", device->name, fc_dtype_get(dtype)->torch_name);
    }
    RETURN_CALL(device, "summing powers", fc_cuda_powers(dtype, data, p, weight, count, sums, fc_cuda_stream(stream)),
                err);
}

static void cuda_destroy(fc_device *device) {
    free(device->state);
    free(device);
}

static const fc_device functions = {
    .is_host = false,
    .alloc = cuda_alloc,
    .release = cuda_release,
    .alloc_staging = cuda_alloc_staging,
    .release_staging = cuda_release_staging,
    .stream_new = cuda_stream_new,
    .stream_free = cuda_stream_free,
    .synchronize = cuda_synchronize,
    .event_new = cuda_event_new,
    .event_free = cuda_event_free,
    .record = cuda_record,
    .wait = cuda_wait,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .copy_box = cuda_copy_box,
    .cast = cuda_cast,
    .add = cuda_add,
    .divide = cuda_divide,
    .multiply = cuda_multiply,
    .powers = cuda_powers,
    .destroy = cuda_destroy,
};

/* Checks that the GPU exists and that this build has code for it. */
static fc_code probe(int index, fc_error *err) {
    int count = 0;
    cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess) {
        return fc_fail(err, FC_EUNSUPPORTED, "cuda:%d: no GPU is usable: %s%s", index, cudaGetErrorString(result),
                       result == cudaErrorInsufficientDriver ? ", or this machine has no GPU" : "");
    }
    if (index < 0 || index >= count) {
        return fc_fail(err, FC_EUNSUPPORTED, "cuda:%d: no such GPU: this process has %d, numbered from 0", index,
                       count);
    }
    int before = index;
    cudaGetDevice(&before);
    result = cudaSetDevice(index);
    if (result == cudaSuccess) {
        result = fc_cuda_probe();
    }
    if (before != index) {
        cudaSetDevice(before);
    }
    if (result != cudaSuccess) {
        return fc_fail(err, FC_EUNSUPPORTED, "cuda:%d: this build cannot use the GPU: %s", index,
                       cudaGetErrorString(result));
    }
    return FC_OK;
}

static fc_code new_cuda(int index, fc_device **out, fc_error *err) {
    *out = NULL;
    FC_TRY(probe(index, err));
    fc_device *device = malloc(sizeof *device);
    fc_cuda_state *state = malloc(sizeof *state);
    if (!device || !state) {
        free(device);
        free(state);
        return fc_fail(err, FC_ENOMEM, "cuda:%d: out of memory", index);
    }
    *device = functions;
    state->index = index;
    snprintf(state->name, sizeof state->name, "cuda:%d", index);
    device->name = state->name;
    device->state = state;
    *out = device;
    return FC_OK;
}

FC_MODULE_EXPORT extern const fc_module FC_MODULE_SYMBOL;
static const struct fc_device_module devices = {.cuda = new_cuda};
const fc_module FC_MODULE_SYMBOL = {FC_MODULE_HEAD, .device_size = sizeof(fc_device), .devices = &devices};
