/*
 * The arithmetic of train_mlp, see mlp.h.
 */
#include "mlp.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <math.h>
#include <string.h>

const mlp_layer mlp_layers[MLP_LAYERS] = {
    {"layers.0", MLP_IN, MLP_HIDDEN},
    {"layers.1", MLP_HIDDEN, MLP_HIDDEN},
    {"head", MLP_HIDDEN, MLP_OUT},
};

mlp_random mlp_random_new(uint64_t seed) {
    return (mlp_random){seed};
}

float mlp_random_next(mlp_random *random) {
    random->state = random->state * 6364136223846793005u + 1442695040888963407u;
    return (float)(random->state >> 40) / 8388608.0f - 1.0f;
}

void mlp_round(fc_dtype dtype, float *values, int64_t count) {
    for (int64_t i = 0; dtype != FC_F32 && i < count; i++) {
        unsigned char narrow[8];
        fc_cast(FC_F32, &values[i], dtype, narrow, 1);
        fc_cast(dtype, narrow, FC_F32, &values[i], 1);
    }
}

void mlp_linear(const mlp_layer *layer, int n, const float *x, const float *w, const float *b, float *y) {
    for (int s = 0; s < n; s++) {
        for (int o = 0; o < layer->out; o++) {
            float sum = 0;
            for (int k = 0; k < layer->in; k++) {
                sum += x[s * layer->in + k] * w[o * layer->in + k];
            }
            y[s * layer->out + o] = sum + b[o];
        }
    }
}

void mlp_linear_backward(const mlp_layer *layer, int n, const float *x, const float *w, const float *g, float *gx,
                         float *gw, float *gb) {
    int in = layer->in, out = layer->out;
    memset(gw, 0, (size_t)(in * out) * sizeof *gw);
    memset(gb, 0, (size_t)out * sizeof *gb);
    for (int s = 0; s < n; s++) {
        for (int o = 0; o < out; o++) {
            gb[o] += g[s * out + o];
            for (int k = 0; k < in; k++) {
                gw[o * in + k] += g[s * out + o] * x[s * in + k];
            }
        }
    }
    for (int s = 0; gx && s < n; s++) {
        for (int k = 0; k < in; k++) {
            float sum = 0;
            for (int o = 0; o < out; o++) {
                sum += g[s * out + o] * w[o * in + k];
            }
            gx[s * in + k] = sum;
        }
    }
}

void mlp_relu(float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = values[i] > 0 ? values[i] : 0;
    }
}

void mlp_relu_backward(const float *y, float *g, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        g[i] = y[i] > 0 ? g[i] : 0;
    }
}

float mlp_loss(const float *y, const float *target, int64_t count, float *g) {
    float sum = 0, factor = 2.0f / (float)count;
    for (int64_t i = 0; i < count; i++) {
        float d = y[i] - target[i];
        sum += d * d;
        g[i] = d * factor;
    }
    return sum / (float)count;
}

void mlp_adamw_step(const mlp_adamw *adamw, int64_t step, float *param, const float *grad, float *exp_avg,
                    float *exp_avg_sq, int64_t count) {
    double correction1 = 1 - pow(adamw->beta1, (double)step), correction2 = 1 - pow(adamw->beta2, (double)step);
    float decay = (float)(1 - adamw->lr * adamw->weight_decay), size = (float)-(adamw->lr / correction1);
    float weight1 = (float)(1 - adamw->beta1), weight2 = (float)(1 - adamw->beta2), beta2 = (float)adamw->beta2;
    float root = (float)sqrt(correction2), eps = (float)adamw->eps;
    for (int64_t i = 0; i < count; i++) {
        param[i] *= decay;
        exp_avg[i] = fmaf(weight1, grad[i] - exp_avg[i], exp_avg[i]); /* lerp and addcmul round once, as in torch */
        exp_avg_sq[i] = fmaf(weight2 * grad[i], grad[i], exp_avg_sq[i] * beta2);
        param[i] += size * exp_avg[i] / (sqrtf(exp_avg_sq[i]) / root + eps);
    }
}
