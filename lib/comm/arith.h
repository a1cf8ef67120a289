/*
 * The arithmetic of reductions on the host: what the `local` and `mpi` backends and the device "cpu" have in common, so
 * that they give the same bits. Pure.
 */
#ifndef FSDPCKPT_COMM_ARITH_H
#define FSDPCKPT_COMM_ARITH_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/comm.h"

/** Whether elements of `dtype` can be reduced by `op`: else FC_EUNSUPPORTED, and FC_EUSAGE for an op that is none. */
fc_code fc_arith_check(fc_dtype dtype, fc_reduce op, fc_error *err);

/** The type of the real numbers that elements of `dtype` consist of, and how many of them: 2 for complex ones. */
fc_dtype fc_arith_component(fc_dtype dtype, size_t *components);

/**
 * out[i] = inputs[0][i] op inputs[1][i] op …, in this order. Types narrower than float32 are computed in float32 and
 * rounded once; a NaN wins MIN and MAX, as in torch; integers wrap; the SUM of booleans is "or".
 * @param n   at least 1; AVG divides by it.
 * @param out may be one of the inputs.
 */
void fc_arith_reduce(fc_dtype dtype, fc_reduce op, const void *const *inputs, int n, void *out, size_t count);

/** data[i] /= divisor: computed in float32 (float64 in float64) and rounded. dtype is floating or complex. */
void fc_arith_divide(fc_dtype dtype, double divisor, void *data, size_t count);

#endif
