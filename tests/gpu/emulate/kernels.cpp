/*
 * The kernels of lib/gather/cuda on the processor. Macros define CUDA's keywords in C++, and the threads of all blocks
 * run one after the other, when the stream comes to the launch. It does not test races between threads. See emulate.h.
 */
#include "emulate.h"

#include <tuple>

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

enum { BLOCK = 256 };

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

template <typename Type> struct same { typedef Type type; };

/* The memory is that of the GPU, which the processor sees elsewhere. */
template <typename Type> static Type seen(Type value) {
    return value;
}
template <typename Type> static Type *seen(Type *memory) {
    return (Type *)emulated_local(memory);
}

template <typename... Parameters> struct launched {
    void (*kernel)(Parameters...);
    unsigned blocks;
    std::tuple<Parameters...> arguments;

    static void run(void *argument) {
        launched *l = (launched *)argument;
        gridDim.x = l->blocks;
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
            for (threadIdx.x = 0; threadIdx.x < BLOCK; threadIdx.x++) {
                std::apply([l](Parameters... values) { l->kernel(seen(values)...); }, l->arguments);
            }
        }
    }
    static void drop(void *argument) {
        delete (launched *)argument;
    }
};

template <typename... Parameters>
static cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, cudaStream_t stream,
                          typename same<Parameters>::type... arguments) {
    typedef launched<Parameters...> work;
    if (emulated_fails("a kernel")) {
        return cudaErrorUnknown;
    }
    emulated_enqueue(stream, {NULL, work::run, work::drop, new work{kernel, blocks, {arguments...}}});
    return cudaSuccess;
}

#define FSDPCKPT_LAUNCH_IS_DEFINED
#include "gather/cuda/kernels.cu"
