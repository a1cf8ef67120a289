/*
 * The part of the CUDA runtime that lib/comm/cuda/device_cuda.c calls, on the processor. Memory is from malloc, and
 * streams do their work at once. With kernels.cpp, it makes a module `cuda` that tests the arithmetic and addressing of
 * every kernel without a GPU. It does not test speed or races between threads.
 */
#ifndef TESTS_GPU_EMULATE_CUDA_RUNTIME_API_H
#define TESTS_GPU_EMULATE_CUDA_RUNTIME_API_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35
} cudaError_t;

enum { cudaMemcpyDeviceToDevice, cudaMemcpyDefault, cudaStreamNonBlocking, cudaEventDisableTiming };

typedef void *cudaStream_t;
typedef void *cudaEvent_t;

typedef struct cudaFuncAttributes {
    int unused;
} cudaFuncAttributes;

static inline cudaError_t cudaMalloc(void **out, size_t bytes) {
    return posix_memalign(out, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

static inline cudaError_t cudaFree(void *memory) {
    free(memory);
    return cudaSuccess;
}

#define cudaMallocHost cudaMalloc
#define cudaFreeHost cudaFree

static inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
    (void)kind;
    (void)stream;
    memmove(dst, src, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    memset(dst, value, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int index) {
    (void)index;
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

static inline cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "out of memory";
}

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, int flags) {
    (void)flags;
    *stream = NULL;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

#define cudaStreamSynchronize cudaStreamDestroy

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, int flags) {
    (void)flags;
    *event = NULL;
    return cudaSuccess;
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    (void)event;
    return cudaSuccess;
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)event;
    (void)stream;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)stream;
    (void)event;
    (void)flags;
    return cudaSuccess;
}

#endif
