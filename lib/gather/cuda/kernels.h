/*
 * The GPU kernels: strided copies, casts, sums, quotients, products and powers. Each function launches work on a stream
 * and returns the result of the launch. The caller has checked the arguments.
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <cuda_runtime_api.h>

FC_BEGIN_DECLS

#include "codec/strided.h"

/** Executes `copy`. `src` and `dst` point to the first elements. The two may not overlap. */
cudaError_t fc_cuda_copy(const fc_strided *copy, const void *src, void *dst, cudaStream_t stream);

/** Casts like fc_cast, between dtypes of FC_CLASS_FLOAT. */
cudaError_t fc_cuda_cast(fc_dtype from, const void *src, fc_dtype to, void *dst, size_t count, cudaStream_t stream);

/** Computes dst[i] += src[i] for real numbers and booleans, like fc_arith_reduce. */
cudaError_t fc_cuda_add(fc_dtype dtype, void *dst, const void *src, size_t count, cudaStream_t stream);

/** Computes data[i] /= divisor for floating-point numbers, like fc_arith_divide. */
cudaError_t fc_cuda_divide(fc_dtype dtype, void *data, double divisor, size_t count, cudaStream_t stream);

/** Computes data[i] *= factor, like fc_arith_multiply. */
cudaError_t fc_cuda_multiply(fc_dtype dtype, void *data, double factor, size_t count, cudaStream_t stream);

/** Adds weight × |x|^p to `sums`, or raises them to |x|, see fc_device.powers. */
cudaError_t fc_cuda_powers(fc_dtype dtype, const void *data, double p, double weight, size_t count, double *sums,
                           cudaStream_t stream);

/** Returns cudaSuccess if the current GPU can run the compiled kernels. */
cudaError_t fc_cuda_probe(void);

FC_END_DECLS
