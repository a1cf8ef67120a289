/*
 * The arithmetic of reductions on the host. The backends `local` and `mpi` and the device "cpu" share it, so that their
 * results are equal bit for bit.
 */
#pragma once

#include "fsdpckpt/comm.h"

/** Checks that `op` can reduce elements of `dtype`. @return FC_EUNSUPPORTED if not, FC_EUSAGE if either does not exist.
 */
fc_code fc_arith_check(fc_dtype dtype, fc_reduce op, fc_error *err);

/** Returns the dtype of the real components of an element, and their number: 2 if it is complex, else 1. */
fc_dtype fc_arith_component(fc_dtype dtype, size_t *components);

/**
 * Computes out[i] = inputs[0][i] op inputs[1][i] op …, in this order. Types narrower than float32 are computed in
 * float32 and rounded once. MIN and MAX return a NaN if there is one, as in torch. Integers wrap. The SUM of booleans
 * is "or".
 * @param n   number of inputs, at least 1; AVG divides by it.
 * @param out may be one of the inputs.
 */
void fc_arith_reduce(fc_dtype dtype, fc_reduce op, const void *const *inputs, int n, void *out, size_t count);

/** Computes data[i] *= factor like fc_arith_divide. */
void fc_arith_multiply(fc_dtype dtype, double factor, void *data, size_t count);

/** Computes data[i] /= divisor in float32 (float64 in float64), rounded once. `dtype` is floating-point or complex. */
void fc_arith_divide(fc_dtype dtype, double divisor, void *data, size_t count);
