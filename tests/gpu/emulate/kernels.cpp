/*
 * The kernels of lib/comm/cuda on the processor. Macros define CUDA's keywords in C++, and the threads of all blocks
 * run one after the other. See cuda_runtime_api.h.
 */
#include <cuda_runtime_api.h>

#define __CUDACC__ 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

struct position {
    unsigned x;
};
static position blockIdx, threadIdx, gridDim;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

template <typename To, typename From> static To same_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline double __longlong_as_double(long long bits) {
    return same_bits<double>(bits);
}
static inline long long __double_as_longlong(double value) {
    return same_bits<long long>(value);
}
static inline uint32_t __float_as_uint(float value) {
    return same_bits<uint32_t>(value);
}
static inline float __uint_as_float(uint32_t bits) {
    return same_bits<float>(bits);
}

template <typename Kernel> static cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel) {
    return cudaSuccess;
}

#define LAUNCH(kernel, blocks, stream, ...)                                                                            \
    do {                                                                                                               \
        gridDim.x = blocks;                                                                                            \
        (void)(stream);                                                                                                \
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {                                                   \
            for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) {                                              \
                kernel(__VA_ARGS__);                                                                                   \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

#include "comm/cuda/kernels.cu"
