/*
 * The kernels of a GPU: strided copies, casts, sums and quotients. Each gives work to a stream and returns what the
 * launch returned; arguments were checked by the caller. Streams are cudaStream_t, results cudaError_t, as in
 * kernels.cu.
 */
#ifndef FSDPCKPT_COMM_CUDA_KERNELS_H
#define FSDPCKPT_COMM_CUDA_KERNELS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/dtype.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "codec/strided.h"

/** Executes `copy`; `src` and `dst` point at the first element and do not overlap. */
cudaError_t fc_cuda_copy(const fc_strided *copy, const void *src, void *dst, cudaStream_t stream);

/** As fc_cast, between FC_CLASS_FLOAT types. */
cudaError_t fc_cuda_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count, cudaStream_t stream);

/** dst[i] += src[i] of real numbers and booleans, as fc_arith_reduce does. */
cudaError_t fc_cuda_add(fc_dtype dtype, void *dst, const void *src, size_t count, cudaStream_t stream);

/** data[i] /= divisor of floating-point numbers, as fc_arith_divide does. */
cudaError_t fc_cuda_divide(fc_dtype dtype, void *data, double divisor, size_t count, cudaStream_t stream);

/** Whether the current GPU can run what was compiled. */
cudaError_t fc_cuda_probe(void);

#ifdef __cplusplus
}
#endif
#endif
