/*
 * The GPU kernels, see kernels.h. They are limited by memory, not by arithmetic. Each thread therefore issues several
 * loads before its first store, and dtypes are selected by a switch on which all threads take the same branch.
 *
 * Results equal those of the processor bit for bit. Casts are the same code (codec/cast_bits.h), sums are single IEEE
 * operations (the file is compiled with -fmad=false and without flush-to-zero), and NaNs are produced as on x86.
 */
#include "gather/cuda/kernels.h"

#include "codec/cast_bits.h"
#include "fsdpckpt/gather/device.h"

#include <math.h>
#include <stdint.h>

enum { THREADS = 256, IN_FLIGHT = 4 };

template <typename Type> struct parameter { typedef Type type; };

/* Launches a kernel. Unlike cudaGetLastError, the result is that of this launch alone. tests/gpu/emulate has its own.
 */
#ifndef FSDPCKPT_LAUNCH_IS_DEFINED
template <typename... Parameters>
static cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, cudaStream_t stream,
                          typename parameter<Parameters>::type... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}
#endif

/* Returns the blocks for `items` at IN_FLIGHT per thread. Above the limit, the loops of the kernels do the rest. */
static unsigned blocks_for(uint64_t items) {
    uint64_t blocks = (items + THREADS * IN_FLIGHT - 1) / (THREADS * IN_FLIGHT);
    return (unsigned)(blocks > 1u << 20 ? 1u << 20 : blocks);
}

/* ---- strided copies ---- */

/* A copy of `total` vectors, in runs of `run` vectors along the axes. Strides are in vectors. */
struct copy_plan {
    uint64_t total, run;
    int n;
    struct {
        uint64_t size, src, dst;
    } axes[FC_MAX_DIMS];
};

/* Divisions dominate the cost of an element, so Index has 32 bits if that is enough. */
template <typename Vector, typename Index>
__device__ __forceinline__ void locate(const copy_plan &plan, Index item, uint64_t *src, uint64_t *dst) {
    Index row = item / (Index)plan.run;
    uint64_t inside = item - row * (Index)plan.run;
    *src = inside;
    *dst = inside;
    for (int i = plan.n - 1; i > 0; i--) {
        Index next = row / (Index)plan.axes[i].size;
        uint64_t at = row - next * (Index)plan.axes[i].size;
        *src += at * plan.axes[i].src;
        *dst += at * plan.axes[i].dst;
        row = next;
    }
    *src += row * plan.axes[0].src;
    *dst += row * plan.axes[0].dst;
}

template <typename Vector, typename Index>
__global__ void __launch_bounds__(THREADS)
    copy_kernel(const __grid_constant__ copy_plan plan, const Vector *__restrict__ src, Vector *__restrict__ dst) {
    const uint64_t step = (uint64_t)gridDim.x * THREADS * IN_FLIGHT;
    for (uint64_t first = (uint64_t)blockIdx.x * THREADS * IN_FLIGHT + threadIdx.x; first < plan.total; first += step) {
        Vector values[IN_FLIGHT];
        uint64_t to[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            uint64_t item = first + (uint64_t)k * THREADS, from;
            if (item < plan.total) {
                locate<Vector, Index>(plan, (Index)item, &from, &to[k]);
                values[k] = src[from];
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (first + (uint64_t)k * THREADS < plan.total) {
                dst[to[k]] = values[k];
            }
        }
    }
}

template <typename Vector>
static cudaError_t launch_copy(const fc_strided *copy, const void *src, void *dst, cudaStream_t stream) {
    copy_plan plan = {};
    plan.run = (uint64_t)copy->unit / sizeof(Vector);
    plan.total = (uint64_t)fc_strided_bytes(copy) / sizeof(Vector);
    plan.n = copy->n;
    for (int i = 0; i < copy->n; i++) {
        plan.axes[i].size = (uint64_t)copy->axes[i].size;
        plan.axes[i].src = (uint64_t)copy->axes[i].src / sizeof(Vector);
        plan.axes[i].dst = (uint64_t)copy->axes[i].dst / sizeof(Vector);
    }
    const Vector *from = (const Vector *)src;
    Vector *to = (Vector *)dst;
    if (plan.total <= UINT32_MAX) {
        return launch(copy_kernel<Vector, uint32_t>, blocks_for(plan.total), stream, plan, from, to);
    }
    return launch(copy_kernel<Vector, uint64_t>, blocks_for(plan.total), stream, plan, from, to);
}

/* Returns the size of the widest vector, at most 16 bytes, that divides all sizes, strides and addresses. */
static unsigned vector_bytes(const fc_strided *copy, const void *src, const void *dst) {
    uint64_t all = (uint64_t)copy->unit | (uint64_t)(uintptr_t)src | (uint64_t)(uintptr_t)dst | 16;
    for (int i = 0; i < copy->n; i++) {
        all |= (uint64_t)copy->axes[i].src | (uint64_t)copy->axes[i].dst;
    }
    return (unsigned)(all & -all);
}

cudaError_t fc_cuda_copy(const fc_strided *copy, const void *src, void *dst, cudaStream_t stream) {
    if (copy->n == 0) {
        return cudaMemcpyAsync(dst, src, (size_t)copy->unit, cudaMemcpyDeviceToDevice, stream);
    }
    switch (vector_bytes(copy, src, dst)) {
    case 16:
        return launch_copy<uint4>(copy, src, dst, stream);
    case 8:
        return launch_copy<uint2>(copy, src, dst, stream);
    case 4:
        return launch_copy<uint32_t>(copy, src, dst, stream);
    case 2:
        return launch_copy<uint16_t>(copy, src, dst, stream);
    default:
        return launch_copy<uint8_t>(copy, src, dst, stream);
    }
}

/* ---- elements ---- */

/* The unsigned type of `size` bytes, for the bits of an element. */
template <int size> struct raw;
template <> struct raw<1> { typedef uint8_t type; };
template <> struct raw<2> { typedef uint16_t type; };
template <> struct raw<4> { typedef uint32_t type; };
template <> struct raw<8> { typedef uint64_t type; };

template <int size> __device__ __forceinline__ uint32_t decode(fc_dtype dtype, typename raw<size>::type value) {
    if constexpr (size == 8) {
        return fc_bits_of_f64(__longlong_as_double((long long)value));
    } else if constexpr (size == 4) {
        return value;
    } else if constexpr (size == 2) {
        return dtype == FC_BF16 ? fc_bits_of_bf16(value) : fc_bits_of_f16(value);
    } else {
        switch (dtype) {
        case FC_F8_E4M3FN:
            return fc_bits_of_e4m3fn(value);
        case FC_F8_E4M3FNUZ:
            return fc_bits_of_e4m3fnuz(value);
        case FC_F8_E5M2:
            return fc_bits_of_e5m2(value);
        case FC_F8_E5M2FNUZ:
            return fc_bits_of_e5m2fnuz(value);
        default:
            return fc_bits_of_e8m0fnu(value);
        }
    }
}

template <int size> __device__ __forceinline__ typename raw<size>::type encode(fc_dtype dtype, uint32_t bits) {
    if constexpr (size == 8) {
        return (uint64_t)__double_as_longlong(fc_f64_of_bits(bits));
    } else if constexpr (size == 4) {
        return bits;
    } else if constexpr (size == 2) {
        return dtype == FC_BF16 ? fc_bf16_of_bits(bits) : fc_f16_of_bits(bits);
    } else {
        switch (dtype) {
        case FC_F8_E4M3FN:
            return fc_e4m3fn_of_bits(bits);
        case FC_F8_E4M3FNUZ:
            return fc_e4m3fnuz_of_bits(bits);
        case FC_F8_E5M2:
            return fc_e5m2_of_bits(bits);
        case FC_F8_E5M2FNUZ:
            return fc_e5m2fnuz_of_bits(bits);
        default:
            return fc_e8m0fnu_of_bits(bits);
        }
    }
}

/* Four elements that are loaded and stored together, if they are aligned. The compiler may use accesses as wide as the
 * alignment, which is 32 bytes on sm_100, so it must not be more than is_aligned checks. */
template <int size> struct alignas(4 * size < 16 ? 4 * size : 16) four { typename raw<size>::type of[4]; };

template <int size> static bool is_aligned(const void *memory) {
    return (uintptr_t)memory % alignof(four<size>) == 0;
}

/* Returns how many groups of four elements the kernels can process. They process the remaining elements one by one. */
template <int a, int b> static size_t by_fours(const void *x, const void *y, size_t count) {
    return is_aligned<a>(x) && is_aligned<b>(y) ? count / 4 : 0;
}

/* ---- casts ---- */

template <int from_size, int to_size>
__global__ void __launch_bounds__(THREADS) cast_kernel(fc_dtype from, const void *__restrict__ src, fc_dtype to,
                                                       void *__restrict__ dst, size_t fours, size_t count) {
    const size_t step = (size_t)gridDim.x * THREADS, me = (size_t)blockIdx.x * THREADS + threadIdx.x;
    for (size_t i = me; i < fours; i += step) {
        four<from_size> in = ((const four<from_size> *)src)[i];
        four<to_size> out;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            out.of[k] = encode<to_size>(to, decode<from_size>(from, in.of[k]));
        }
        ((four<to_size> *)dst)[i] = out;
    }
    for (size_t i = 4 * fours + me; i < count; i += step) {
        uint32_t bits = decode<from_size>(from, ((const typename raw<from_size>::type *)src)[i]);
        ((typename raw<to_size>::type *)dst)[i] = encode<to_size>(to, bits);
    }
}

template <int from_size, int to_size>
static cudaError_t launch_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count,
                               cudaStream_t stream) {
    size_t fours = by_fours<from_size, to_size>(src, dst, count);
    return launch(cast_kernel<from_size, to_size>, blocks_for(count), stream, from, src, to, dst, fours, count);
}

template <int from_size>
static cudaError_t cast_from(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count, uint32_t to_size,
                             cudaStream_t stream) {
    switch (to_size) {
    case 8:
        return launch_cast<from_size, 8>(from, src, to, dst, count, stream);
    case 4:
        return launch_cast<from_size, 4>(from, src, to, dst, count, stream);
    case 2:
        return launch_cast<from_size, 2>(from, src, to, dst, count, stream);
    default:
        return launch_cast<from_size, 1>(from, src, to, dst, count, stream);
    }
}

cudaError_t fc_cuda_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count, cudaStream_t stream) {
    if (count == 0) {
        return cudaSuccess;
    }
    if (from == to) {
        return cudaMemcpyAsync(dst, src, count * fc_dtype_size(from), cudaMemcpyDeviceToDevice, stream);
    }
    uint32_t size = fc_dtype_size(to);
    switch (fc_dtype_size(from)) {
    case 8:
        return cast_from<8>(from, src, to, dst, count, size, stream);
    case 4:
        return cast_from<4>(from, src, to, dst, count, size, stream);
    case 2:
        return cast_from<2>(from, src, to, dst, count, size, stream);
    default:
        return cast_from<1>(from, src, to, dst, count, size, stream);
    }
}

/* ---- sums and quotients ---- */

/* Replaces a NaN by the one that x86 produces: the first NaN operand, made quiet, or else the default NaN. */
__device__ __forceinline__ uint32_t keep_nan(uint32_t a, uint32_t b, uint32_t result) {
    if ((result & 0x7fffffff) <= 0x7f800000) {
        return result;
    }
    return (a & 0x7fffffff) > 0x7f800000 ? a | 0x400000 : (b & 0x7fffffff) > 0x7f800000 ? b | 0x400000 : 0xffc00000;
}

__device__ __forceinline__ uint64_t keep_nan(uint64_t a, uint64_t b, uint64_t result) {
    const uint64_t magnitude = ~(uint64_t)0 >> 1, infinity = (uint64_t)0x7ff << 52, quiet = (uint64_t)1 << 51;
    if ((result & magnitude) <= infinity) {
        return result;
    }
    return (a & magnitude) > infinity ? a | quiet : (b & magnitude) > infinity ? b | quiet : (uint64_t)0xfff8 << 48;
}

__device__ __forceinline__ bool is_float(fc_dtype dtype) {
    switch (dtype) {
    case FC_I64:
    case FC_I32:
    case FC_I16:
    case FC_I8:
    case FC_U64:
    case FC_U32:
    case FC_U16:
    case FC_U8:
    case FC_BOOL:
        return false;
    default:
        return true;
    }
}

enum operation { ADD, DIVIDE, MULTIPLY };

template <operation op, typename Number> __device__ __forceinline__ Number result_of(Number x, Number y) {
    return op == DIVIDE ? x / y : op == MULTIPLY ? x * y : x + y;
}

/* Computes a + b, a / by or a * by. */
template <int size, operation op>
__device__ __forceinline__ typename raw<size>::type compute(fc_dtype dtype, typename raw<size>::type a,
                                                            typename raw<size>::type b, double by) {
    if (!is_float(dtype)) {
        return dtype == FC_BOOL ? a | b : a + b;
    }
    if constexpr (size == 8) {
        double x = __longlong_as_double((long long)a), y = op != ADD ? by : __longlong_as_double((long long)b);
        double result = result_of<op>(x, y);
        return keep_nan(a, (uint64_t)__double_as_longlong(y), (uint64_t)__double_as_longlong(result));
    } else {
        uint32_t x = decode<size>(dtype, a), y = op != ADD ? __float_as_uint((float)by) : decode<size>(dtype, b);
        float result = result_of<op>(__uint_as_float(x), __uint_as_float(y));
        return encode<size>(dtype, keep_nan(x, y, __float_as_uint(result)));
    }
}

template <int size, operation op>
__global__ void __launch_bounds__(THREADS)
    compute_kernel(fc_dtype dtype, void *__restrict__ dst, const void *__restrict__ src, double by, size_t fours,
                   size_t count) {
    typedef typename raw<size>::type element;
    const size_t step = (size_t)gridDim.x * THREADS, me = (size_t)blockIdx.x * THREADS + threadIdx.x;
    for (size_t i = me; i < fours; i += step) {
        four<size> a = ((const four<size> *)dst)[i], b = a;
        if (op == ADD) {
            b = ((const four<size> *)src)[i];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a.of[k] = compute<size, op>(dtype, a.of[k], b.of[k], by);
        }
        ((four<size> *)dst)[i] = a;
    }
    for (size_t i = 4 * fours + me; i < count; i += step) {
        element a = ((const element *)dst)[i], b = op != ADD ? a : ((const element *)src)[i];
        ((element *)dst)[i] = compute<size, op>(dtype, a, b, by);
    }
}

template <int size, operation op>
static cudaError_t launch_sized(fc_dtype dtype, void *dst, const void *src, double by, size_t count,
                                cudaStream_t stream) {
    size_t fours = by_fours<size, size>(dst, src, count);
    return launch(compute_kernel<size, op>, blocks_for(count), stream, dtype, dst, src, by, fours, count);
}

template <operation op>
static cudaError_t launch_compute(fc_dtype dtype, void *dst, const void *src, double by, size_t count,
                                  cudaStream_t stream) {
    if (count == 0) {
        return cudaSuccess;
    }
    switch (fc_dtype_size(dtype)) {
    case 8:
        return launch_sized<8, op>(dtype, dst, src, by, count, stream);
    case 4:
        return launch_sized<4, op>(dtype, dst, src, by, count, stream);
    case 2:
        return launch_sized<2, op>(dtype, dst, src, by, count, stream);
    default:
        return launch_sized<1, op>(dtype, dst, src, by, count, stream);
    }
}

cudaError_t fc_cuda_add(fc_dtype dtype, void *dst, const void *src, size_t count, cudaStream_t stream) {
    return launch_compute<ADD>(dtype, dst, src, 0, count, stream);
}

cudaError_t fc_cuda_divide(fc_dtype dtype, void *data, double divisor, size_t count, cudaStream_t stream) {
    return launch_compute<DIVIDE>(dtype, data, data, divisor, count, stream);
}

cudaError_t fc_cuda_multiply(fc_dtype dtype, void *data, double factor, size_t count, cudaStream_t stream) {
    return launch_compute<MULTIPLY>(dtype, data, data, factor, count, stream);
}

/* ---- powers ---- */

template <int size> __device__ __forceinline__ double magnitude(fc_dtype dtype, typename raw<size>::type bits) {
    if constexpr (size == 8) {
        return fabs(__longlong_as_double((long long)bits));
    } else {
        return fabs((double)__uint_as_float(decode<size>(dtype, bits)));
    }
}

/* Adds |x|^p, or the maximum, to `sum`. */
__device__ __forceinline__ double with_power(double sum, double x, double p) {
    if (isinf(p)) {
        return x > sum || x != x ? x : sum;
    }
    return sum + (p == 2 ? x * x : p == 1 ? x : pow(x, p));
}

/* Each thread has one sum, so there is no order between threads on which the result could depend. */
template <int size>
__global__ void __launch_bounds__(THREADS) power_kernel(fc_dtype dtype, const void *__restrict__ data, double p,
                                                        double weight, size_t fours, size_t count, double *sums) {
    typedef typename raw<size>::type element;
    const size_t step = (size_t)gridDim.x * THREADS, me = (size_t)blockIdx.x * THREADS + threadIdx.x;
    double sum = 0;
    for (size_t i = me; i < fours; i += step) {
        four<size> a = ((const four<size> *)data)[i];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum = with_power(sum, magnitude<size>(dtype, a.of[k]), p);
        }
    }
    for (size_t i = 4 * fours + me; i < count; i += step) {
        sum = with_power(sum, magnitude<size>(dtype, ((const element *)data)[i]), p);
    }
    sums[me] = isinf(p) ? with_power(sums[me], sum, p) : sums[me] + weight * sum;
}

template <int size>
static cudaError_t launch_powers(fc_dtype dtype, const void *data, double p, double weight, size_t count, double *sums,
                                 cudaStream_t stream) {
    unsigned blocks = blocks_for(count), most = FC_POWER_SUMS / THREADS;
    return launch(power_kernel<size>, blocks < most ? blocks : most, stream, dtype, data, p, weight,
                  by_fours<size, size>(data, data, count), count, sums);
}

cudaError_t fc_cuda_powers(fc_dtype dtype, const void *data, double p, double weight, size_t count, double *sums,
                           cudaStream_t stream) {
    if (count == 0) {
        return cudaSuccess;
    }
    switch (fc_dtype_size(dtype)) {
    case 8:
        return launch_powers<8>(dtype, data, p, weight, count, sums, stream);
    case 4:
        return launch_powers<4>(dtype, data, p, weight, count, sums, stream);
    case 2:
        return launch_powers<2>(dtype, data, p, weight, count, sums, stream);
    default:
        return launch_powers<1>(dtype, data, p, weight, count, sums, stream);
    }
}

cudaError_t fc_cuda_probe(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, copy_kernel<uint4, uint32_t>);
}
