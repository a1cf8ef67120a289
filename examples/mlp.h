/*
 * The arithmetic of train_mlp: a small multi-layer perceptron on the host, in float32 rounded to the dtype that the
 * parameters are computed in. Every sum runs in the order of its indices, so that a program that adds in the same order
 * gets the same bits (tests/mpi/train_mlp.py is one).
 */
#ifndef EXAMPLES_MLP_H
#define EXAMPLES_MLP_H

#include "fsdpckpt/dtype.h"

#include <stdint.h>

enum { MLP_IN = 12, MLP_HIDDEN = 20, MLP_OUT = 5, MLP_LAYERS = 3, MLP_BATCH = 8, MLP_WIDEST = MLP_HIDDEN };

/** A Linear of the model: "layers.0", "layers.1", "head". */
typedef struct mlp_layer {
    const char *name;
    int in, out;
} mlp_layer;

extern const mlp_layer mlp_layers[MLP_LAYERS];

/** A generator of numbers in [-1, 1), multiples of 2^-23. */
typedef struct mlp_random {
    uint64_t state;
} mlp_random;

mlp_random mlp_random_new(uint64_t seed);
float mlp_random_next(mlp_random *random);

/** Rounds numbers to `dtype` (float32: not at all). */
void mlp_round(fc_dtype dtype, float *values, int64_t count);

/** y[n][out] = x[n][in] · w[out][in]ᵀ + b[out]. */
void mlp_linear(const mlp_layer *layer, int n, const float *x, const float *w, const float *b, float *y);

/** The gradients of mlp_linear for g = dL/dy. `gx` may be NULL. */
void mlp_linear_backward(const mlp_layer *layer, int n, const float *x, const float *w, const float *g, float *gx,
                         float *gw, float *gb);

void mlp_relu(float *values, int64_t count);
/** g = 0 where y, the result of mlp_relu, is 0. */
void mlp_relu_backward(const float *y, float *g, int64_t count);

/** The mean squared error, and its gradient. */
float mlp_loss(const float *y, const float *target, int64_t count, float *g);

/** AdamW, as torch.optim.AdamW without foreach or fused kernels. */
typedef struct mlp_adamw {
    double lr, beta1, beta2, eps, weight_decay;
} mlp_adamw;

/** One update; `step` counts from 1. */
void mlp_adamw_step(const mlp_adamw *adamw, int64_t step, float *param, const float *grad, float *exp_avg,
                    float *exp_avg_sq, int64_t count);

#endif
