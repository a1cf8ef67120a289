/*
 * A quantized weight: its codes, its scales, and which scale belongs to which element.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "plan/quantized.h"
#include "weights/computed.h"

/** A quantized weight. fc_computed_block.what points to it. */
typedef struct fc_scaled {
    const fc_tensor *codes, *scales;
    bool pairs; /**< each byte of the codes holds two four-bit floats, the first one in its low bits */
    /** Number of leading dimensions of the weight that the scales have; along the others a scale is the same. */
    int ndim;
    int64_t block[FC_MAX_DIMS]; /**< elements of the weight along each of these dimensions that share a scale */
} fc_scaled;

/**
 * Finds which scale belongs to which element.
 * @param shape  of the weight; it has as many dimensions as the codes.
 * @param blocks the sizes of blocks along the last two dimensions that the model's configuration has; 0: unknown.
 * @return FC_EUNSUPPORTED if shapes or dtypes do not fit.
 */
fc_code fc_scaled_fit(fc_scaled *w, const int64_t *shape, const int64_t *blocks, fc_error *err);

/** The scales that a box of the weight needs. */
typedef struct fc_scale_box {
    int64_t offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS], strides[FC_MAX_DIMS]; /**< in scales */
    float *values;
} fc_scale_box;

/** Reads the scales that a block of the weight needs. Uses buffers 1 and 2 of the block. */
fc_code fc_scales_read(const fc_computed_block *block, const fc_scaled *w, fc_scale_box *out, fc_error *err);

/**
 * Reads a box of scales as floats, into buffer 1 of the block. Scales of type uint8 are exponents of two, with bias
 * 127. Uses buffer 2.
 */
fc_code fc_scales_as_floats(const fc_computed_block *block, const fc_tensor *scales, const fc_box *box, float **out,
                            fc_error *err);

/** The values of four-bit floats (E2M1). */
extern const float fc_four_bit_floats[16];

/** Computes a block of MXFP4 weights whose codes are blocks of 32 along the next to last dimension of the weight. */
fc_code fc_four_bits_compute(const fc_computed_block *block, fc_error *err);
