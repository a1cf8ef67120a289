/*
 * What the modules of GPUs share: how a device and its streams are seen from inside. The structs belong to the module
 * `cuda`; the module `nccl` reads them.
 */
#ifndef FSDPCKPT_COMM_CUDA_DEVICE_H
#define FSDPCKPT_COMM_CUDA_DEVICE_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/device.h"

#include <cuda_runtime_api.h>

#include <string.h>

struct fc_stream {
    cudaStream_t cuda;
};

struct fc_event {
    cudaEvent_t cuda;
};

/** fc_device.state of a GPU. */
typedef struct fc_cuda_state {
    int index;
    char name[16];
} fc_cuda_state;

/** Whether `device` is one of this kind. */
static inline bool fc_is_cuda(const fc_device *device) {
    return !device->is_host && strncmp(device->name, "cuda:", 5) == 0;
}

static inline cudaStream_t fc_cuda_stream(const fc_stream *stream) {
    return stream ? stream->cuda : NULL;
}

/** Makes the device's GPU that of this thread: each call of the runtime means the thread's. */
static inline cudaError_t fc_cuda_use(const fc_device *device) {
    return cudaSetDevice(((const fc_cuda_state *)device->state)->index);
}

#endif
