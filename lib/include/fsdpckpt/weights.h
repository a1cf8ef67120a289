/*
 * Weights that must be computed: a derived checkpoint has them in place of what they are computed from. They are
 * computed block by block while they are read, so they need no memory, and fc_convert writes them like any checkpoint.
 *
 * A source belongs to the new checkpoint after success, and is closed with it; after a failure it remains the caller's.
 */
#ifndef FSDPCKPT_WEIGHTS_H
#define FSDPCKPT_WEIGHTS_H

#include "fsdpckpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Turns quantized weights, which are stored as codes and scales, into numbers of `dtype`: code × scale in float32,
 * rounded once. Scales are per tensor, per channel or per block; four-bit codes are those of MXFP4. Scales of
 * activations are left out.
 * @param config the model's config.json, or its folder, which has the size of the blocks if they do not divide a
 *               weight evenly and are not 128 × 128; NULL: none.
 * @return FC_EUSAGE if the source has no quantized weights; FC_EUNSUPPORTED for codes that need more than one scale.
 */
fc_code fc_dequantize(fc_checkpoint *source, fc_dtype dtype, const char *config, fc_checkpoint **out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
