/*
 * The structs of a GPU device, its streams and its events. The module `cuda` makes them; the module `nccl` reads them.
 */
#pragma once

#include "fsdpckpt/gather/device.h"

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
    int index;     /**< the CUDA device number */
    char name[16]; /**< "cuda:0", fc_device.name */
} fc_cuda_state;

/** Returns whether `device` is a GPU of the module `cuda`. */
static inline bool fc_is_cuda(const fc_device *device) {
    return !device->is_host && strncmp(device->name, "cuda:", 5) == 0;
}

/** Returns the CUDA stream; NULL stands for the default stream. */
static inline cudaStream_t fc_cuda_stream(const fc_stream *stream) {
    return stream ? stream->cuda : NULL;
}

/**
 * Makes the GPU of `device` the current one of this thread, which calls of the CUDA runtime use, and remembers the one
 * before in `before`. fc_cuda_leave makes that the current one again: the caller may use another GPU of its own.
 */
static inline cudaError_t fc_cuda_enter(const fc_device *device, int *before) {
    int index = ((const fc_cuda_state *)device->state)->index;
    cudaError_t result = cudaGetDevice(before);
    if (result != cudaSuccess) {
        *before = index;
        return result;
    }
    return *before == index ? cudaSuccess : cudaSetDevice(index);
}

static inline void fc_cuda_leave(const fc_device *device, int before) {
    if (before != ((const fc_cuda_state *)device->state)->index) {
        cudaSetDevice(before);
    }
}
