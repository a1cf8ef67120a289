/*
 * The arithmetic of train_mlp: a small multi-layer perceptron on the host, in float32 and rounded to the param dtype.
 * Every sum runs in the order of its indices, so a program that adds in the same order gets the same bits
 * (tests/oracle/train_mlp.py does).
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <stdint.h>

enum { MLP_IN = 12, MLP_HIDDEN = 20, MLP_OUT = 5, MLP_LAYERS = 3, MLP_BATCH = 8, MLP_WIDEST = MLP_HIDDEN };

/** A Linear layer of the model: "layers.0", "layers.1" or "head". */
typedef struct mlp_layer {
    const char *name;
    int in, out;
} mlp_layer;

extern const mlp_layer mlp_layers[MLP_LAYERS];

/** Generates numbers in [-1, 1) that are multiples of 2^-23. */
typedef struct mlp_random {
    uint64_t state;
} mlp_random;

mlp_random mlp_random_new(uint64_t seed);
float mlp_random_next(mlp_random *random);

/** Rounds numbers to `dtype`. */
void mlp_round(fc_dtype dtype, float *values, int64_t count);

/** Computes y[n][out] = x[n][in] · w[out][in]ᵀ + b[out]. */
void mlp_linear(const mlp_layer *layer, int n, const float *x, const float *w, const float *b, float *y);

/** Computes the gradients of mlp_linear for g = dL/dy. `gx` may be NULL. */
void mlp_linear_backward(const mlp_layer *layer, int n, const float *x, const float *w, const float *g, float *gx,
                         float *gw, float *gb);

void mlp_relu(float *values, int64_t count);
/** Sets g to 0 where y, the result of mlp_relu, is 0. */
void mlp_relu_backward(const float *y, float *g, int64_t count);

/** Returns the mean squared error and computes its gradient. */
float mlp_loss(const float *y, const float *target, int64_t count, float *g);

/** The options of AdamW, which computes like torch.optim.AdamW without foreach or fused kernels. */
typedef struct mlp_adamw {
    double lr, beta1, beta2, eps, weight_decay;
} mlp_adamw;

/** Makes one update. `step` counts from 1. */
void mlp_adamw_step(const mlp_adamw *adamw, int64_t step, float *param, const float *grad, float *exp_avg,
                    float *exp_avg_sq, int64_t count);
